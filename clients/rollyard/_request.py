"""From what a caller gives to a valid request, or an error that names the field."""

import base64
from collections.abc import Mapping

from pydantic import ValidationError

from rollyard._call import PLAIN, Options, RunLike
from rollyard.errors import BadRequest
from rollyard.types import RunRequest

_DEFAULTS: dict[str, object] = {
    "template": "auto",
    "on_output_limit": "truncate",
    "language": "python",
    "isolation": "warm",
    "echo_last": False,
    "priority": 0,
}


def make_request(
    code: str, *, job: str, run_id: str | None = None, options: Options = PLAIN
) -> RunRequest:
    """Validate the arguments of ``run``.

    Raises:
        BadRequest: an argument is malformed; the message names it.
    """
    wanted = options.fetch_files
    given: dict[str, object] = {
        **options._asdict(),
        "files": options.files or None,
        "fetch_files": ([wanted] if isinstance(wanted, str) else list(wanted)) or None,
        "run_id": run_id,
    }
    # Spares most runs most fields, and an older service those that it does not know.
    fields = {name: value for name, value in given.items() if value != _DEFAULTS.get(name)}
    fields |= {"code": code, "job": job}
    return _validated(fields, where="")


def request_of(item: RunLike, *, job: str, index: int) -> RunRequest:
    """Validate one item of a batch; ``job`` is for those that name none.

    Raises:
        BadRequest: the item is malformed; the message names its place and field.
    """
    where = f"runs.{index}."
    if isinstance(item, str):
        return _validated({"code": item, "job": job}, where=where)
    if isinstance(item, RunRequest):
        return item if "job" in item.model_fields_set else item.model_copy(update={"job": job})
    return _validated({"job": job, **item}, where=where)


def _validated(fields: dict[str, object], *, where: str) -> RunRequest:
    files = fields.get("files")
    if isinstance(files, Mapping):
        fields["files"] = {path: _wire_content(content) for path, content in files.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    try:
        return RunRequest.model_validate(fields)
    except ValidationError as error:
        problems = [
            f"{where}{'.'.join(str(part) for part in problem['loc'])}: {problem['msg']}"
            for problem in error.errors(include_url=False, include_input=False)
        ]
        raise BadRequest("; ".join(problems), status=422) from error


def _wire_content(content: object) -> object:
    if isinstance(content, bytes | bytearray):
        return {"base64": base64.b64encode(content).decode()}
    return content
