"""API keys, kept and compared as SHA-256 digests.

Protects against: reading a key out of this process's memory or a core dump, and guessing it from
the time that a comparison takes. Does not protect against: short keys (a digest of random bytes
needs no slow hash; a digest of a word does), and listening in on plain HTTP.
"""

import base64
import hashlib
import hmac
import re
from collections.abc import Iterable
from typing import Self

from rollyard_service.settings import GatewaySettings

_DIGEST = re.compile(r"sha256:([0-9a-fA-F]{64})")


class ApiKeys:
    """The accepted keys. Empty: every caller is accepted."""

    def __init__(self, keys: Iterable[str]) -> None:
        """Take keys in plain text or as ``sha256:<hex digest>``.

        Raises:
            ValueError: a key has white space or is not printable ASCII.
        """
        self._digests = tuple(_digest(key) for key in keys)

    @classmethod
    def from_settings(cls, settings: GatewaySettings) -> Self:
        """Collect the keys of a setting and of a file.

        Raises:
            OSError: the file cannot be read.
            ValueError: keys were asked for but there is none, or one is malformed.
        """
        keys = [key.strip() for key in settings.api_keys.get_secret_value().split(",")]
        if settings.api_keys_file is not None:
            lines = settings.api_keys_file.read_text(encoding="utf-8").splitlines()
            keys += [line.strip() for line in lines if not line.lstrip().startswith("#")]
        accepted = cls(key for key in keys if key)
        if settings.has_keys and not accepted:
            raise ValueError(
                "API keys were asked for, but there is none: put one a line into"
                f" {settings.api_keys_file} (ROLLYARD_API_KEYS_FILE) or set ROLLYARD_API_KEYS"
            )
        return accepted

    def __len__(self) -> int:
        return len(self._digests)

    def accepted(self, authorization: bytes) -> bytes:
        """The digest of the accepted key that the value of an Authorization header brings, or "".

        ``Bearer <key>``, or ``Basic`` with the key as password: clients of other services can
        send no header, but have a URL, ``http://any:<key>@host``.
        """
        scheme, _, credentials = authorization.partition(b" ")
        if scheme.lower() == b"bearer":
            return self.accepted_key(credentials.strip())
        if scheme.lower() == b"basic":
            try:
                decoded = base64.b64decode(credentials, validate=True)
            except ValueError:
                return b""
            return self.accepted_key(decoded.partition(b":")[2])
        return b""

    def accepted_key(self, key: bytes) -> bytes:
        """The digest of this key if it is an accepted one, or ""."""
        presented = hashlib.sha256(key).digest()
        matches = [hmac.compare_digest(presented, digest) for digest in self._digests]
        return (
            presented if any(matches) else b""
        )  # after all were compared: which one matched does not show in the time


def _digest(key: str) -> bytes:
    if match := _DIGEST.fullmatch(key):
        return bytes.fromhex(match[1])
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError("an API key must be printable ASCII without white space")
    return hashlib.sha256(key.encode()).digest()
