"""The gateway's settings, its keys, and who may reach it."""

import hashlib
import inspect
from pathlib import Path

import pytest
from pydantic import ValidationError

from rollyard_service.keys import ApiKeys
from rollyard_service.origin import from_foreign_page, is_loopback
from rollyard_service.settings import GatewaySettings


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ROLLYARD_API_KEYS", "ROLLYARD_HOST", "ROLLYARD_REDIS_URL"):
        monkeypatch.delenv(name, raising=False)


def test_environment_is_read_and_flags_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLYARD_REDIS_URL", "unix:///a")
    monkeypatch.setenv("ROLLYARD_PORT", "1")
    monkeypatch.setenv("ROLLYARD_SLOTS", "9")  # another process's setting
    settings = GatewaySettings(port=2)
    assert (settings.redis_url, settings.port) == ("unix:///a", 2)


def test_every_setting_is_documented() -> None:
    source = inspect.getsource(GatewaySettings)
    for name in GatewaySettings.model_fields:
        after = source.partition(f"\n    {name}: ")[2].splitlines()
        assert after[1].strip().startswith('"""'), name


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "", "gateway.internal"])
def test_public_address_needs_a_key(host: str) -> None:
    with pytest.raises(ValidationError, match="ROLLYARD_API_KEYS"):
        GatewaySettings(host=host)
    with pytest.raises(ValidationError, match="ROLLYARD_API_KEYS"):
        GatewaySettings.model_validate({"host": host, "api_keys": " , "})
    assert GatewaySettings.model_validate({"host": host, "api_keys": "k"}).has_keys


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_needs_none(host: str) -> None:
    assert is_loopback(host)
    assert not GatewaySettings(host=host).has_keys


def test_keys_do_not_show() -> None:
    settings = GatewaySettings.model_validate({"api_keys": "very-secret"})
    assert "very-secret" not in repr(settings)
    assert "very-secret" not in repr(vars(ApiKeys.from_settings(settings)))


def test_keys_from_setting_and_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    digest = hashlib.sha256(b"hashed").hexdigest()
    file.write_text(f"# team a\nplain\n\n  sha256:{digest}\n", encoding="utf-8")
    keys = ApiKeys.from_settings(
        GatewaySettings.model_validate({"api_keys": "one, two,", "api_keys_file": file})
    )
    assert len(keys) == 4
    for key in (b"one", b"two", b"plain", b"hashed"):
        assert keys.accepted(b"Bearer " + key)
    for value in (b"", b"Bearer", b"Bearer ", b"Bearer #", b"one", b"Bearer one two", b"\xff"):
        assert not keys.accepted(value)
    assert not keys.accepted(b"Bearer sha256:" + digest.encode())


def test_empty_file_opens_nothing(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# none yet\n", encoding="utf-8")
    with pytest.raises(ValueError, match="there is none"):
        ApiKeys.from_settings(GatewaySettings(api_keys_file=file))
    with pytest.raises(FileNotFoundError):
        ApiKeys.from_settings(GatewaySettings(api_keys_file=tmp_path / "missing"))


@pytest.mark.parametrize("key", ["two words", "ключ", "tab\tbed"])
def test_odd_key_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match="printable ASCII"):
        ApiKeys([key])


@pytest.mark.parametrize(
    ("origin", "host", "foreign"),
    [
        ("http://127.0.0.1:8000", "127.0.0.1:8000", False),
        ("http://[::1]:8000", "[::1]:8000", False),
        ("http://localhost:8000", "localhost:8000", False),
        ("http://evil.example:8000", "evil.example:8000", True),  # DNS rebinding
        ("http://evil.example", "127.0.0.1:8000", True),
        ("http://127.0.0.1:9000", "127.0.0.1:8000", True),
        ("null", "127.0.0.1:8000", True),
        ("http://[", "127.0.0.1:8000", True),
        ("", "", True),
    ],
)
def test_foreign_pages(origin: str, host: str, foreign: bool) -> None:
    assert from_foreign_page(origin, host) is foreign
