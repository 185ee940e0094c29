"""Commands beside Python in the guest image: a shell with its usual tools, and Debian's g++."""

import os
import re
import shutil
import subprocess
from pathlib import Path

_TOOLS = (
    "awk", "basename", "bash", "cat", "chmod", "cp", "cut", "date", "diff", "dirname", "echo",
    "env", "expr", "false", "find", "grep", "head", "id", "ls", "mkdir", "mktemp", "mv", "paste",
    "printf", "pwd", "readlink", "rm", "rmdir", "sed", "seq", "sh", "sleep", "sort", "tac", "tail",
    "tee", "test", "touch", "tr", "true", "uname", "uniq", "wc", "xargs",
)  # fmt: skip
_SEARCH = "/usr/bin:/bin"
# Headers and start files of libc; the compiler's own are found by asking it.
_LIBC_PACKAGES = ("libc6-dev", "linux-libc-dev")
_MAX_SCRIPT_BYTES = 4096  # libm.so and libc.so are texts that name other libraries
_PROGRAMS = ("cc1plus", "collect2", "as", "ld")
# Of the compiler's folder: other languages, sanitizers and plug-ins, two thirds of its size.
_UNNEEDED = ("cc1", "lto1", "lto-wrapper", "plugin", "*san*", "libgomp*", "libitm*", "g++-mapper*")


def copy_tools(root: Path) -> None:
    """Copy the shell tools that this machine has."""
    for tool in _TOOLS:
        if found := shutil.which(tool, path=_SEARCH):
            shutil.copy2(Path(found).resolve(), root / "usr/bin" / tool)


def copy_locale(root: Path) -> None:
    """Copy the one locale that runs have, where libc keeps it in files."""
    folder = Path("/usr/lib/locale/C.utf8")
    if folder.is_dir():
        shutil.copytree(folder, root / str(folder).lstrip("/"))


def has_cpp() -> bool:
    """True where Debian's g++ can be copied from."""
    return bool(shutil.which("g++", path=_SEARCH) and shutil.which("dpkg", path=_SEARCH))


def copy_cpp(root: Path) -> None:
    """Copy g++ with what it needs to compile and link, to the same paths below ``root``."""
    _copy(Path(_ask("-print-prog-name=collect2")).resolve(), root)
    for name in _PROGRAMS:
        path = Path(_ask(f"-print-prog-name={name}"))
        if not path.is_absolute():  # found by PATH at run time
            path = Path(shutil.which(path, path=_SEARCH) or f"/usr/bin/{name}")
        _copy(path.resolve(), root, name=path)
    _copy(Path(shutil.which("g++", path=_SEARCH) or "/usr/bin/g++").resolve(), root,
          name=Path("/usr/bin/g++"))  # fmt: skip
    for name in ("libgcc_s.so.1", "libstdc++.so.6"):
        library = Path(os.path.normpath(_ask(f"-print-file-name={name}")))
        _copy(library.resolve(), root, name=library)
    own = Path(_ask("-print-file-name=crtbegin.o")).resolve().parent
    _copy_tree(own, root)
    for folder in _include_folders():
        if "c++" in folder.parts:
            _copy_tree(folder, root)
    listed = subprocess.run(  # noqa: S603
        ["/usr/bin/dpkg", "-L", *_LIBC_PACKAGES], capture_output=True, text=True, check=True
    ).stdout
    for line in listed.splitlines():
        path = Path(line)
        wanted = path.parts[1:3] in (("usr", "include"), ("usr", "lib"))
        if wanted and path.exists() and not path.is_dir():
            _copy(path, root)
            if path.suffix == ".so" and path.stat().st_size < _MAX_SCRIPT_BYTES:
                for name in re.findall(r"/\S+\.so\.\d+", path.read_text("ascii", "ignore")):
                    _copy(Path(name).resolve(), root, name=Path(name))


def _ask(question: str) -> str:
    return subprocess.run(  # noqa: S603
        ["/usr/bin/g++", question], capture_output=True, text=True, check=True
    ).stdout.strip()


def _include_folders() -> list[Path]:
    said = subprocess.run(
        ["/usr/bin/g++", "-E", "-x", "c++", "-v", "/dev/null"],
        capture_output=True, text=True, check=True,
    ).stderr  # fmt: skip
    listed = re.search(r"#include <\.\.\.> search starts here:\n(.*?)\nEnd", said, re.DOTALL)
    return [Path(line.strip()) for line in listed[1].splitlines()] if listed else []


def _copy(path: Path, root: Path, *, name: Path | None = None) -> None:
    target = root / str(name or path).lstrip("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    if not target.exists() and not target.is_symlink():
        shutil.copy2(path, target, follow_symlinks=name is not None)


def _copy_tree(folder: Path, root: Path) -> None:
    shutil.copytree(
        folder, root / str(folder).lstrip("/"), symlinks=True, dirs_exist_ok=True,
        ignore=shutil.ignore_patterns(*_UNNEEDED),
    )  # fmt: skip
