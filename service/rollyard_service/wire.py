"""The wire contract as msgspec reads it: 0.5 µs a run, where pydantic takes 5.

Guarantees: what is taken here, the models of :mod:`rollyard.types` take too, with the same meaning
(a property test compares the two). The other way round nothing is promised: what is rare or needs
thought (files, huge code, repeated ids, limits above this server's maximum), and everything that
is malformed, is left to those models, which also have the words for what is wrong.
"""

import os
import re
from hashlib import blake2b
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from rollyard.types import JOB_PATTERN, MIB, RUN_ID_PATTERN, Language, RunRequest, Template
from rollyard_queue.records import DIGEST_BYTES
from rollyard_service.ceilings import Ceilings

MAX_CODE_CHARS = 200_000
"""Longer code may not fit onto the smallest disk; pydantic's model does that sum."""

_RUN_ID = RUN_ID_PATTERN.strip("^$")
_RUN_IDS = re.compile(rf"(?:{_RUN_ID}\n)+")
_JOB = re.compile(JOB_PATTERN.strip("^$"))
_Seconds = Annotated[float, Meta(gt=0, le=3600)]


class WireLimits(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, gc=False
):
    """:class:`rollyard.types.Limits`."""

    timeout_s: _Seconds = 10.0
    compile_timeout_s: _Seconds = 10.0
    cpu_s: _Seconds | None = None
    memory_bytes: Annotated[int, Meta(ge=16 * MIB, le=1 << 40)] = 512 * MIB
    disk_bytes: Annotated[int, Meta(ge=1 * MIB, le=1 << 40)] = 64 * MIB
    pids: Annotated[int, Meta(ge=1, le=4096)] = 64
    output_bytes: Annotated[int, Meta(ge=0, le=64 * MIB)] = 256 * 1024


_USUAL = WireLimits()


class WireRun(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """:class:`rollyard.types.RunRequest`; encoded, it is what ``RunSpec`` of the queue reads."""

    code: str
    run_id: str | None = None
    stdin: str | None = None
    files: dict[str, str] = {}
    fetch_files: list[str] = []
    limits: WireLimits = _USUAL
    language: Language = "python"
    isolation: Literal["warm", "fresh"] = "warm"
    echo_last: bool = False
    template: Template = "auto"
    on_output_limit: Literal["truncate", "stop"] = "truncate"
    job: str = "default"
    priority: Annotated[int, Meta(ge=-100, le=100)] = 0
    deadline_s: Annotated[float, Meta(gt=0, le=86400)] | None = None


class _WireBatch(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    runs: Annotated[list[WireRun], Meta(min_length=1, max_length=1024)]


class _AnyRun(WireRun, omit_defaults=True):
    """With files too."""

    files: dict[str, str | dict[str, str]] = {}  # pyright: ignore[reportIncompatibleVariableOverride]


_encode = msgspec.json.Encoder().encode
_decode_any = msgspec.json.Decoder(_AnyRun).decode
_decode_run = msgspec.json.Decoder(WireRun).decode
_decode_batch = msgspec.json.Decoder(_WireBatch).decode


def read_run(body: bytes, ceilings: Ceilings) -> list[WireRun] | None:
    """One run, with an id and within the ceilings; None: let pydantic look at it."""
    try:
        return _checked([_decode_run(body)], ceilings)
    except msgspec.MsgspecError:
        return None


def read_batch(body: bytes, ceilings: Ceilings) -> list[WireRun] | None:
    """The runs of a batch, each with an id and within the ceilings; None: let pydantic look."""
    try:
        return _checked(_decode_batch(body).runs, ceilings)
    except msgspec.MsgspecError:
        return None


def written(run: WireRun) -> tuple[bytes, bytes]:
    """The payload for a worker, and the digest of what is asked for; ``run`` is used up.

    The digest leaves out the id, and what says when: retries shorten the deadline.
    """
    run_id = run.run_id or ""
    run.run_id = run.deadline_s = None
    run.priority = 0
    content = _encode(run)
    # An id has nothing to escape.
    payload = b'{"run_id":"%b",%b' % (run_id.encode(), content[1:])
    return payload, blake2b(content, digest_size=DIGEST_BYTES).digest()


def digest_of(run: RunRequest) -> bytes:
    """The digest that :func:`written` gives the same request.

    For a run may take this way or that: a neighbour in its batch decides.
    """
    fields = run.model_dump_json(exclude_unset=True, exclude={"run_id"})
    return written(_decode_any(fields))[1]


def _checked(runs: list[WireRun], ceilings: Ceilings) -> list[WireRun] | None:
    usual_fits = ceilings.cover(_USUAL)
    fresh = ""
    run_ids: list[str] = []
    jobs: set[str] = set()
    for index, run in enumerate(runs):
        if (
            run.files
            or run.fetch_files
            or len(run.code) > MAX_CODE_CHARS
            or (run.echo_last and (run.language != "python" or run.isolation != "warm"))
            or not (usual_fits if run.limits is _USUAL else ceilings.cover(run.limits))
        ):
            return None
        if run.run_id is None:
            # Ids are secrets: whoever knows one gets the result.
            fresh = fresh or os.urandom(16 * len(runs)).hex()
            run.run_id = fresh[32 * index : 32 * index + 32]
        run_ids.append(run.run_id)
        jobs.add(run.job)
    # One pass over all ids at once; a line break inside one would add a line.
    lines = "\n".join(run_ids) + "\n"
    if not _RUN_IDS.fullmatch(lines) or lines.count("\n") != len(runs):
        return None
    if len(set(run_ids)) != len(runs) or not all(map(_JOB.fullmatch, jobs)):
        return None
    return runs
