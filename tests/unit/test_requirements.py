"""Promises and security tests belong together, in both directions."""

import ast
from pathlib import Path

from requirements import PROMISES

from rollyard_sandbox.probe import SPEED, WHAT

SECURITY = Path(__file__).parents[1] / "security"


def _tests() -> dict[str, list[str]]:
    """Test function to the promises that it names."""
    found: dict[str, list[str]] = {}
    for path in SECURITY.glob("test_*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                found[f"{path.name}::{node.name}"] = _named(node)
    return found


def _named(test: ast.FunctionDef) -> list[str]:
    return [
        argument.value
        for decorator in test.decorator_list
        if isinstance(decorator, ast.Call)
        and isinstance(decorator.func, ast.Name)
        and decorator.func.id == "requirement"
        for argument in decorator.args
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
    ]


def test_every_security_test_holds_a_promise() -> None:
    tests = _tests()
    assert tests
    assert [name for name, promises in tests.items() if not promises] == []


def test_every_promise_is_held_by_a_test() -> None:
    tested = {promise for promises in _tests().values() for promise in promises}
    assert sorted(PROMISES.keys() ^ tested) == []


def test_every_layer_of_the_doctor_is_a_promise() -> None:
    walls = {name.removeprefix("wall.") for name in PROMISES if name.startswith("wall.")}
    assert walls == WHAT.keys() - SPEED
