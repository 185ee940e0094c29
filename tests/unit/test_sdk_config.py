"""Settings of a client."""

import copy
from typing import Any

import pytest

from rollyard import AsyncClient, Client, _transport
from rollyard._config import DEFAULT_URL, Address, ClientConfig, make_config
from rollyard._up import reachable

DEFAULTS: dict[str, Any] = {
    "api_key": None,
    "job": "default",
    "timeout_s": None,
    "max_retries": None,
    "batch_max_runs": 512,
    "batch_max_delay_s": 0.002,
    "max_connections": 256,
    "transport": "httpx2",
}


def config(base_url: str | list[str] | None = None, **changed: Any) -> ClientConfig:
    return make_config(base_url, **{**DEFAULTS, **changed})


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROLLYARD_URL", raising=False)
    monkeypatch.delenv("ROLLYARD_API_KEY", raising=False)


@pytest.mark.parametrize(
    ("text", "url", "socket_path"),
    [
        (None, DEFAULT_URL, None),
        ("http://gateway:8080/", "http://gateway:8080", None),
        ("https://gateway/prefix/", "https://gateway/prefix", None),
        ("http://[::1]:8080", "http://[::1]:8080", None),
        ("unix:///run/rollyard/gateway.sock", "http://localhost", "/run/rollyard/gateway.sock"),
        ("unix:///run/a%20b.sock", "http://localhost", "/run/a b.sock"),
    ],
)
def test_base_url(text: str | None, url: str, socket_path: str | None) -> None:
    [made] = config(text).gateways
    assert (made.base_url, made.socket_path) == (url, socket_path)


@pytest.mark.parametrize(
    "text",
    ["gateway:8080", "ftp://x", "http://", "unix://relative.sock", "unix:", "http://x?a=1"],
)
def test_malformed_base_url(text: str) -> None:
    with pytest.raises(ValueError, match="base_url"):
        config(text)


def test_environment_is_the_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLYARD_URL", "http://from-environment")
    monkeypatch.setenv("ROLLYARD_API_KEY", "key-from-environment")
    assert config().gateways == (Address("http://from-environment"),)
    assert config().api_key == "key-from-environment"
    assert config("http://given").gateways == (Address("http://given"),)
    assert config("http://given", api_key="given").api_key == "given"
    assert config(api_key="").api_key is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"timeout_s": 0},
        {"max_retries": -1},
        {"batch_max_runs": 0},
        {"batch_max_runs": 1025},
        {"batch_max_delay_s": 2},
        {"max_connections": 0},
        {"transport": "carrier pigeon"},
        {"api_key": "line\nbreak"},
        {"api_key": "schlüssel"},
    ],
)
def test_setting_out_of_range_is_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        config(**wrong)
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Client(**wrong)


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_repr_names_the_service_and_hides_the_key(kind: type[Client] | type[AsyncClient]) -> None:
    client = kind("unix:///run/g.sock", api_key="secret")
    text = f"{kind.__name__}('unix:///run/g.sock', job='default', transport='httpx2')"
    assert repr(client) == text
    assert repr(copy.deepcopy(client)) == text


@pytest.mark.parametrize(
    ("listening", "client"),
    [
        ("http://0.0.0.0:8000", "http://127.0.0.1:8000"),
        ("http://[::]:8000", "http://[::1]:8000"),
        ("http://10.0.0.0:8000", "http://10.0.0.0:8000"),
        ("unix:///run/g.sock", "unix:///run/g.sock"),
    ],
)
def test_up_names_an_address_that_works(listening: str, client: str) -> None:
    assert reachable(listening) == client


@pytest.mark.parametrize(
    "given",
    ["http://a, http://b/,http://a", ["http://a", "http://b"], ("http://a/", "http://b")],
)
def test_several_gateways(given: str | list[str]) -> None:
    made = config(given)
    assert made.gateways == (Address("http://a"), Address("http://b"))
    assert repr(made) == "'http://a,http://b', job='default', transport='httpx2'"


@pytest.mark.parametrize("given", ["http://a,", ["http://a", ""], ",", ["gateway"]])
def test_each_of_several_gateways_is_checked(given: str | list[str]) -> None:
    with pytest.raises(ValueError, match="base_url"):
        config(given)


def test_missing_aiohttp_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_found(_name: str) -> None: ...

    monkeypatch.setattr(_transport, "find_spec", not_found)
    with pytest.raises(ImportError, match=r"pip install 'rollyard\[aiohttp\]'"):
        Client(transport="aiohttp")
