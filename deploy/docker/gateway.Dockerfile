# syntax=docker/dockerfile:1
# The gateway: HTTP in front of the queue. Build from the repository's root:
#   docker build -f deploy/docker/gateway.Dockerfile -t rollyard-gateway .
FROM python:3.13-slim-bookworm AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY clients clients
COPY service service
COPY sandbox sandbox
COPY loadtest loadtest
COPY examples/data examples/data
RUN python -m venv /opt/rollyard \
 && /opt/rollyard/bin/pip install --no-cache-dir '.[service]'

FROM python:3.13-slim-bookworm
COPY --from=build /opt/rollyard /opt/rollyard
# Nobody's own id: it needs no file of the image but to read it.
USER 10001:10001
ENV PYTHONUNBUFFERED=1
EXPOSE 8000
ENTRYPOINT ["/opt/rollyard/bin/rollyard", "gateway"]
