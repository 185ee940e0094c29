# syntax=docker/dockerfile:1
# The worker: runs programs in jails. Build from the repository's root:
#   docker build -f deploy/docker/worker.Dockerfile -t rollyard-worker .
# What a container of it needs, and why, is in deploy/README.md.
FROM python:3.13-slim-bookworm AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY clients clients
COPY service service
COPY sandbox sandbox
COPY loadtest loadtest
COPY examples/data examples/data
RUN python -m venv /opt/rollyard \
 && /opt/rollyard/bin/pip install --no-cache-dir '.[sandbox]'

FROM python:3.13-slim-bookworm
# g++ for runs in C++, tzdata for zones in programs; the libraries are nsjail's.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ libnl-3-200 libnl-route-3-200 tzdata \
 && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/rollyard /opt/rollyard
ENV PYTHONUNBUFFERED=1 ROLLYARD_STATE_DIR=/var/lib/rollyard
# The guests' image and code are part of this image: a container starts at once, without a network,
# and on a read-only root.
RUN /opt/rollyard/bin/python -m rollyard_sandbox.image \
 && /opt/rollyard/bin/python -c 'from pathlib import Path; from rollyard_sandbox.jail import guest_code; guest_code(Path("/var/lib/rollyard"))'
# Root, because jails map to a range of other ids; deploy/README.md says what is taken from it.
# hadolint ignore=DL3002
USER 0:0
EXPOSE 9100
ENTRYPOINT ["/opt/rollyard/bin/rollyard", "worker"]
