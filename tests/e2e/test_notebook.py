"""State by replay, against a real service."""

import asyncio

import pytest

from rollyard.integrations.notebook import ANSWER_FILE, AsyncNotebook, Notebook
from rollyard.integrations.python_tool import AsyncPythonTool, PythonTool
from rollyard.types import Limits

from .conftest import Service


@pytest.fixture
def notebook(service: Service) -> Notebook:
    return Notebook(PythonTool(service.address))


def test_cells_build_on_each_other_and_only_the_last_prints(notebook: Notebook) -> None:
    assert notebook.python("x = 40\nprint('loud')\nx") == "loud\n40"
    assert notebook.python("import os; os.system('echo loud'); y = x + 2") == "loud"
    assert notebook.python("print(y)\nos.getcwd() and y") == "42\n42"
    assert notebook.python("None") == "[no output]"


def test_a_cell_that_failed_stays_with_what_it_did_before(notebook: Notebook) -> None:
    text = notebook.python("z = 1\n1 / 0\nz = 2")
    assert text.endswith("ZeroDivisionError: division by zero")
    assert 'File "<cell 1>", line 2, in <module>\n    1 / 0' in text
    assert "replay" not in text
    assert notebook.python("z") == "1"
    assert "SyntaxError" in notebook.python("def")
    assert "exit code 3" in notebook.python("import sys; sys.exit(3)")
    assert notebook.python("z") == "1"


def test_a_cell_that_a_limit_ended_leaves_nothing(service: Service) -> None:
    notebook = Notebook(PythonTool(service.address, limits=Limits(timeout_s=1)))
    notebook.python("kept = 1")
    assert "[timeout" in notebook.python("lost = 1\nwhile True: pass")
    assert notebook.python("'lost' in globals(), kept") == "(False, 1)"
    assert notebook.cells == ("kept = 1", "'lost' in globals(), kept")


def test_files_classes_and_main_are_there_again(notebook: Notebook) -> None:
    notebook.python("class A: pass\nopen('f', 'w').write('text')\nimport pickle")
    assert notebook.python("pickle.loads(pickle.dumps(A())).__class__ is A") == "True"
    assert notebook.python("open('f').read(), __name__") == "('text', '__main__')"
    notebook.reset()
    assert "NameError" in notebook.python("A")


def test_a_fork_goes_its_own_way(notebook: Notebook) -> None:
    notebook.python("path = ['root']")
    branch = notebook.fork()
    notebook.python("path.append('a')")
    branch.python("path.append('b')")
    assert notebook.python("path") == "['root', 'a']"
    assert branch.python("path") == "['root', 'b']"


def test_concurrent_calls_of_one_notebook_take_turns(service: Service) -> None:
    async def scenario() -> str:
        notebook = AsyncNotebook(AsyncPythonTool(service.address))
        await notebook.python("seen = []")
        await asyncio.gather(*(notebook.python(f"seen.append({i})") for i in range(5)))
        copies = [notebook.fork() for _ in range(8)]
        texts = await asyncio.gather(*(copy.python("sorted(seen)") for copy in copies))
        assert set(texts) == {"[0, 1, 2, 3, 4]"}
        return await notebook.python("len(seen)")

    assert asyncio.run(scenario()) == "5"


def test_an_answer_ends_the_program_and_comes_back_as_json(service: Service) -> None:
    notebook = Notebook(PythonTool(service.address), answer_call="final_answer")
    notebook.python("import os\nx = {'a': [1, None]}\nos.chdir('/tmp')")
    for code, value in (
        (
            "print('then')\nfinal_answer(x)\nprint('never')",
            b'{"final": true, "value": {"a": [1, null]}}',
        ),
        ("x['a']", b'{"final": false, "value": [1, null]}'),
        ("try:\n    final_answer(os)\nexcept Exception: pass", b"module 'os'"),
    ):
        text, result = notebook.run(code)
        assert "never" not in text
        assert result is not None
        assert value in result.file_bytes(ANSWER_FILE)


def test_what_is_no_program_changes_nothing(notebook: Notebook) -> None:
    assert notebook.python(5).startswith("[invalid call")  # type: ignore[arg-type]
    assert notebook.python("\ud800").startswith("[invalid call")
    assert notebook.cells == ()


def test_science_is_found_in_cells(notebook: Notebook) -> None:
    notebook.python("import sympy\nx = sympy.Symbol('x')")
    _, result = notebook.run("sympy.diff(x**2)")
    assert result is not None
    assert (result.stdout, result.template) == ("2*x\n", "science")
