"""Which ports are free, and who holds one that is not."""

import os
import socket
import subprocess
import sys

import pytest

from rollyard._ports import CannotListen, free_ports, port_holder


def test_a_wanted_port_and_free_ones_are_distinct() -> None:
    first, second = free_ports("127.0.0.1", [0, 0])
    assert first != second
    assert free_ports("127.0.0.1", [first, 0])[0] == first
    assert port_holder(first) == ""


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0", ""])
def test_a_taken_port_is_said_with_its_holder(host: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert port_holder(port).startswith(f"process {os.getpid()} (")
        with pytest.raises(CannotListen, match=rf"{port}: process {os.getpid()} \(.*--port"):
            free_ports(host, [0, port])
    assert free_ports("127.0.0.1", [port]) == [port]


def test_a_socket_that_is_bound_and_does_not_listen_yet_is_no_hindrance_to_know_of() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        assert port_holder(port) == ""
        with pytest.raises(CannotListen, match="another process of this machine has it"):
            free_ports("127.0.0.1", [port])


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_an_address_of_another_machine_is_refused(host: str) -> None:
    with pytest.raises(CannotListen, match=f"cannot listen on {host} port"):
        free_ports(host, [0])


@pytest.mark.parametrize("host", ["::", "::1"])
def test_ipv6_is_bound_for_itself(host: str) -> None:
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        assert free_ports(host, [port]) == [port]


def test_a_name_is_looked_at_with_all_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    both = [
        socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0] for host in ("::1", "127.0.0.1")
    ]

    def resolve(*_: object, **__: object) -> object:
        return both

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(CannotListen, match=f"port {port}: process {os.getpid()} "):
            free_ports("localhost", [port])
    first, second = free_ports("localhost", [0, 0])
    assert first != second


def test_a_holder_is_named_without_its_arguments() -> None:
    program = "import socket, sys; s = socket.create_server(('127.0.0.1', 0))\n"
    program += "print(s.getsockname()[1], flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-Xredis://:hunter2@queue", "-c", program],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        holder = port_holder(int(process.stdout.readline()))
        process.communicate()
    assert holder.startswith(f"process {process.pid} (")
    assert "hunter2" not in holder
