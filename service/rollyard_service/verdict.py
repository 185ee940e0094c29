"""Results that the gateway itself makes: a run whose real result it cannot wait for."""

from rollyard.types import RunResult


def infra_error(run_id: str, message: str) -> bytes:
    """The JSON of a result that says nothing about the program."""
    return (
        RunResult(run_id=run_id, outcome="infra_error", message=message).model_dump_json().encode()
    )
