"""Guest images: the read-only root file system that every jail of a worker shares.

An image is one directory, self-contained: a copied interpreter with its standard library, the
libraries of the chosen template set, the shared objects these need, a shell, and mount points.
No path of the host is visible inside beyond it. It is built once and named by a digest of all
that went into it, so a half-built or outdated image is never used.
"""

import argparse
import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Generator, Iterable
from importlib import resources
from pathlib import Path

from rollyard_sandbox import images, toolchain

FORMAT = 8  # raise when the layout changes: another image is then built, beside the old one
PYTHON_HOME = "/opt/python"
GUEST_HOME = "/opt/rollyard"
TEMPLATES = ("bare", "science", "plot")

# Never needed by a run, and more than half of the standard library's size.
_SKIPPED_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idlelib", "turtledemo",
                   "ensurepip", "lib2to3", "tkinter"}  # fmt: skip
_ETC = {
    "passwd": "root:x:0:0:root:/:/bin/false\nrunner:x:1000:1000:runner:/box/work:/bin/sh\n",
    "group": "root:x:0:\nrunner:x:1000:\n",
    "hosts": "127.0.0.1 localhost\n::1 localhost\n",
    # No resolver: a name look-up fails at once instead of waiting for a network that is not there.
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}
_LINKS = {
    "bin": "usr/bin",
    "lib": "usr/lib",
    "lib64": "usr/lib64",
    "tmp": "box/tmp",
    "dev/shm": "/box/shm",
    "dev/fd": "/proc/self/fd",
    "dev/stdin": "/proc/self/fd/0",
    "dev/stdout": "/proc/self/fd/1",
    "dev/stderr": "/proc/self/fd/2",
    "var/tmp": "/box/tmp",
}
DEVICES = ("null", "zero", "full", "random", "urandom")


class ImageError(RuntimeError):
    """The image cannot be built here; the message says what is missing."""


def default_state_dir() -> Path:
    """Where images live: /var/lib for root, else the user's data directory.

    Root's jails map to an unprivileged range, which cannot pass through a home of mode 0700.
    """
    if os.geteuid() == 0:
        return Path("/var/lib/rollyard")
    base = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(base) / "rollyard"


def template_names(text: str) -> tuple[str, ...]:
    """The templates of a comma-separated list, checked.

    Raises:
        ValueError: a name is unknown, or there is none.
    """
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    unknown = sorted(set(names) - set(TEMPLATES))
    if unknown or not names:
        raise ValueError(
            f"templates: {', '.join(unknown) or 'none given'}; known are {', '.join(TEMPLATES)}"
        )
    return names


def requirements(templates: Iterable[str]) -> str:
    """The pinned requirement lines of a set of templates, comments removed."""
    if not {"science", "plot"} & set(templates):
        return ""
    text = resources.files("rollyard_sandbox").joinpath("science.txt").read_text()
    lines = (line.split("#", 1)[0].strip() for line in text.splitlines())
    return "".join(f"{line}\n" for line in lines if line)


def image_path(state_dir: Path, templates: Iterable[str]) -> Path:
    """The root directory of the image for this interpreter and these templates, built or not."""
    parts = (str(FORMAT), sys.version, sys.base_prefix, requirements(templates))
    parts += ("cpp",) if toolchain.has_cpp() else ()
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return state_dir / "images" / f"py{version}-{digest}"


def languages(root: Path) -> frozenset[str]:
    """What an image can run."""
    commands = {"bash": "usr/bin/bash", "cpp": "usr/bin/g++"}
    return frozenset({"python", *(name for name, at in commands.items() if (root / at).exists())})


def ensure_image(
    state_dir: Path, templates: Iterable[str], *, say: Callable[[str], None] = lambda _: None
) -> Path:
    """Return the image's root directory, building it first if need be (about a minute).

    A build then removes what it made superfluous (see :mod:`rollyard_sandbox.images`).

    Raises:
        ImageError: it cannot be built; the message says why and what to do.
    """
    templates = tuple(templates)
    target = image_path(state_dir, templates)
    if target.is_dir():
        return target
    _make_searchable(target.parent)
    with images.building(target):
        if target.is_dir():
            return target
        say(f"building the guest image {target.name} (once; {', '.join(templates)})")
        staging = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        try:
            _build(staging, templates, say)
            staging.chmod(0o755)
            staging.rename(target)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        say(f"guest image ready: {target}")
    _prune(target.parent, say)
    return target


def _prune(folder: Path, say: Callable[[str], None]) -> None:
    try:
        images.prune(
            folder, idle_s=images.IDLE_S,
            before=lambda image: say(f"removing {image.path.name}, an image that nobody uses"),
        )  # fmt: skip
    except OSError as error:  # of no importance to what the image was built for
        say(f"cannot remove old guest images: {error}")


@contextlib.contextmanager
def open_image(
    state_dir: Path, templates: Iterable[str], *, say: Callable[[str], None] = lambda _: None
) -> Generator[Path]:
    """The same, and nobody removes the image while the block lasts.

    Raises:
        ImageError: it cannot be built; the message says why and what to do.
    """
    templates = tuple(templates)
    while True:
        root = ensure_image(state_dir, templates, say=say)
        with images.using(root):
            if root.is_dir():  # not removed in between
                yield root
                return


def _make_searchable(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        writable = os.access(directory, os.W_OK)
    except OSError:
        writable = False
    if not writable:
        raise ImageError(
            f"the guest image cannot be written below {directory}; set ROLLYARD_STATE_DIR to a "
            "directory that is writable, or to one where the image already is"
        )
    if os.geteuid() != 0:
        return
    for place in (directory, *directory.parents):
        if not place.stat().st_mode & 0o001:
            raise ImageError(
                f"{place} is not searchable for the unprivileged users that jails map to; "
                "set ROLLYARD_STATE_DIR to a directory below /var/lib or /opt"
            )


def _build(root: Path, templates: tuple[str, ...], say: Callable[[str], None]) -> None:
    for name in ("usr/bin", "usr/lib", "usr/lib64", "etc", "dev", "proc", "box", "var", "opt"):
        (root / name).mkdir(parents=True)
    for name in DEVICES:
        (root / "dev" / name).touch()  # targets of bind mounts
    for link, to in _LINKS.items():
        (root / link).symlink_to(to)
    for name, text in _ETC.items():
        (root / "etc" / name).write_text(text)
    (root / GUEST_HOME.lstrip("/")).mkdir()
    say("  copying the interpreter")
    site_packages = _copy_python(root)
    if wanted := requirements(templates):
        say("  installing the science libraries")
        _install(site_packages, wanted)
        figures = resources.files("rollyard_sandbox").joinpath("site", "rollyard_figures.py")
        (site_packages / "rollyard_figures.py").write_bytes(figures.read_bytes())
    toolchain.copy_tools(root)
    toolchain.copy_locale(root)
    if toolchain.has_cpp():
        say("  copying the C++ compiler")
        toolchain.copy_cpp(root)
    if (zones := Path("/usr/share/zoneinfo")).is_dir():
        shutil.copytree(zones, root / "usr/share/zoneinfo", symlinks=True,
                        ignore=shutil.ignore_patterns("right", "posix"))  # fmt: skip
    say("  collecting shared libraries")
    _copy_shared_libraries(root)
    for path in root.rglob("*"):
        if not path.is_symlink():  # readable for all, writable and set-user-id for nobody
            path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o111 else 0o644)


def _copy_python(root: Path) -> Path:
    home = root / PYTHON_HOME.lstrip("/")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stdlib = Path(sysconfig.get_path("stdlib"))
    (home / "bin").mkdir(parents=True)
    base = getattr(sys, "_base_executable", sys.executable) or sys.executable
    binary = home / "bin" / f"python{version}"
    shutil.copy2(Path(base).resolve(), binary)
    for alias in ("python", "python3"):
        (home / "bin" / alias).symlink_to(binary.name)
        (root / "usr/bin" / alias).symlink_to(f"{PYTHON_HOME}/bin/{binary.name}")
    lib = home / "lib" / f"python{version}"

    def skipped(directory: str, names: list[str]) -> set[str]:
        top = Path(directory) == stdlib
        static = {n for n in names if n.startswith(("config-", "_tkinter.")) or n.endswith(".a")}
        return static | (_SKIPPED_STDLIB & set(names) if top else set())

    shutil.copytree(stdlib, lib, ignore=skipped)
    (lib / "site-packages").mkdir(exist_ok=True)
    return lib / "site-packages"


def _install(site_packages: Path, wanted: str) -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(wanted)
        file.flush()
        common = ["--target", str(site_packages), "--requirement", file.name, "--no-deps"]
        if uv := shutil.which("uv"):
            command = [uv, "pip", "install", "--python", sys.executable, *common]
        else:
            quiet = ["--quiet", "--no-compile", "--disable-pip-version-check"]
            command = [sys.executable, "-m", "pip", "install", *quiet, "--only-binary", ":all:"]
            command += common
        done = subprocess.run(command, capture_output=True, text=True)  # noqa: S603
    if done.returncode:
        raise ImageError(
            "cannot install the science libraries into the guest image:\n"
            f"{done.stderr.strip()[-2000:]}\n"
            "Give this machine access to a package index, or start with --templates bare."
        )
    for tests in [path for path in site_packages.rglob("tests") if path.is_dir()]:
        shutil.rmtree(tests)
    compiled = [sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash",
                "-s", str(site_packages), "-p", f"{PYTHON_HOME}/lib/{site_packages.parent.name}"
                "/site-packages", str(site_packages)]  # fmt: skip
    subprocess.run(compiled, check=False, capture_output=True)  # noqa: S603


def _copy_shared_libraries(root: Path) -> None:
    """Copy what the dynamic linker would load from the host, until nothing new turns up."""
    home = root / PYTHON_HOME.lstrip("/")
    objects = [*(home / "bin").glob("python*.*"), *(root / "usr/bin").iterdir()]
    objects += [path for path in home.rglob("*.so*") if path.is_file()]
    objects += [path for path in (root / "usr/lib/gcc").rglob("*") if os.access(path, os.X_OK)]
    needed = _linked(path for path in objects if not path.is_symlink())
    libc_dirs = [Path(path).parent for name, path in needed.items() if name.startswith("libc.so")]
    if not libc_dirs:
        raise ImageError("ldd does not name a libc: only glibc systems are supported")
    # libc loads it by name when a thread is cancelled or exits; no object links to it.
    if (unwinder := libc_dirs[0] / "libgcc_s.so.1").exists():
        needed.setdefault(unwinder.name, str(unwinder))
    for name, source in needed.items():
        place = Path(source)
        if name.startswith("/"):  # the program interpreter, wanted at this very path
            target = root / name.lstrip("/")
        elif place.parts[1] in ("lib", "lib64") or place.parts[1:3] in (
            ("usr", "lib"),
            ("usr", "lib64"),
        ):
            target = root / source.lstrip("/")
        else:
            target = root / str(libc_dirs[0]).lstrip("/") / name
        if not str(place).startswith(str(root)) and not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(place.resolve(), target)


def _linked(objects: Iterable[Path]) -> dict[str, str]:
    """Shared objects that ``objects`` load, by soname (or by path, for the interpreter)."""
    found: dict[str, str] = {}
    paths = [str(path) for path in objects]
    for start in range(0, len(paths), 64):
        output = subprocess.run(  # noqa: S603 - ldd of files that we copied or installed
            ["/usr/bin/ldd", *paths[start : start + 64]],
            capture_output=True,
            text=True,
            check=False,
        ).stdout
        for name, path in re.findall(r"^\s+(\S+) => (/\S+) \(", output, re.MULTILINE):
            found.setdefault(name, path)
        for path in re.findall(r"^\s+(/\S+) \(", output, re.MULTILINE):
            found.setdefault(path, path)
    return found


def main() -> int:
    """Build the image. Exit code 1: it cannot be built here; 2: a template is unknown."""
    parser = argparse.ArgumentParser(
        prog="python -m rollyard_sandbox.image",
        description="Build the read-only root that jails of this worker share (once).",
    )
    parser.add_argument(
        "--templates",
        default=os.environ.get("ROLLYARD_TEMPLATES") or ",".join(TEMPLATES),
        help="default: ROLLYARD_TEMPLATES, else all: %(default)s",
    )
    parser.add_argument(
        "--state-dir",
        type=Path,
        help="default: ROLLYARD_STATE_DIR, else /var/lib/rollyard for root and ~/.local/share "
        "for others",
    )
    options = parser.parse_args()
    state_dir = options.state_dir or Path(
        os.environ.get("ROLLYARD_STATE_DIR") or default_state_dir()
    )

    def say(line: str) -> None:
        sys.stderr.write(line + "\n")

    try:
        path = ensure_image(state_dir, template_names(options.templates), say=say)
    except ValueError as error:
        say(f"rollyard: {error}")
        return 2
    except ImageError as error:
        say(f"rollyard: {error}")
        return 1
    sys.stdout.write(f"{path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
