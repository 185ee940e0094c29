"""Which ports are free, and who holds one that is not."""

import os
import socket

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
        with pytest.raises(CannotListen, match="another process"):
            free_ports("127.0.0.1", [port])


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_an_address_of_another_machine_is_refused(host: str) -> None:
    with pytest.raises(CannotListen, match=f"cannot listen on {host} port"):
        free_ports(host, [0])
