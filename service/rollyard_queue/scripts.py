"""The Lua scripts of ``lua/``, by name."""

import hashlib
from functools import cache
from pathlib import Path
from typing import Literal

import msgspec

LUA = Path(__file__).parent / "lua"

ScriptName = Literal[
    "submit",
    "cancel",
    "inbox",
    "claim",
    "renew",
    "finish",
    "release",
    "announce",
    "reap",
    "wake",
    "stats",
    "ready",
]


class Script(msgspec.Struct, frozen=True):
    """One script as the server gets it. ``sha`` is the name that the server knows it by."""

    source: bytes
    sha: str


@cache
def script(name: ScriptName) -> Script:
    """Return a script with the prelude put between its shebang line and its body."""
    shebang, _, body = (LUA / f"{name}.lua").read_bytes().partition(b"\n")
    source = shebang + b"\n" + (LUA / "prelude.lua").read_bytes() + body
    # The protocol's own name for a script, not a safeguard.
    return Script(source, hashlib.sha1(source, usedforsecurity=False).hexdigest())
