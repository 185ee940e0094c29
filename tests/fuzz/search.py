"""``scripts/fuzz``: search for inputs that break a target, guided by coverage (atheris).

    python tests/fuzz/search.py [--minutes N] [--keep] [TARGET…]

Every target is searched in a process of its own. What was found lies in ``.fuzz/TARGET``; an input
that breaks one is named, with the command that runs it again. ``--keep`` adds to the corpus in the
repository what reaches code that nothing there reaches.
"""

import argparse
import importlib
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

_CORPUS = Path(__file__).with_name("corpus")
_ROOT = Path(__file__).parents[2]
_MAX_BYTES = 2048
_INPUT_S = 10
TARGETS = ("request", "report", "collected", "fetch", "output", "result")


def _one(target: str, arguments: list[str]) -> None:
    """Be the process that searches; never returns (libFuzzer's driver exits)."""
    # By name: it is no dependency of the tests, and has no stubs.
    atheris: Any = importlib.import_module("atheris")
    with atheris.instrument_imports(include=["rollyard", "rollyard_sandbox"]):
        targets = importlib.import_module("targets")
    # libFuzzer starts itself again by this name to merge a corpus.
    itself = f"{sys.executable} {__file__} --one {target}"
    atheris.Setup([itself, *arguments], targets.TARGETS[target])
    atheris.Fuzz()


def _start(target: str, *arguments: str) -> int:
    command = [sys.executable, __file__, "--one", target, *arguments]
    return subprocess.run(command, check=False).returncode


def _search(target: str, seconds: int, keep: bool) -> bool:
    """True when nothing broke."""
    found, broken = _ROOT / ".fuzz" / target, _ROOT / ".fuzz" / "broken" / target
    kept = _CORPUS / target
    for folder in (found, broken, kept):
        folder.mkdir(parents=True, exist_ok=True)
    sys.stderr.write(f"==> {target}: {seconds} s\n")
    well = _start(
        target, str(found), str(kept), f"-max_total_time={seconds}", f"-max_len={_MAX_BYTES}",
        f"-timeout={_INPUT_S}", f"-artifact_prefix={broken}/", "-print_final_stats=1",
        "-verbosity=1", "-rss_limit_mb=2048",
    ) == 0  # fmt: skip
    for one in sorted(broken.iterdir()):
        sys.stderr.write(f"BROKEN: scripts/fuzz --again {target} {one}\n")
        well = False
    if keep and well:
        before = len(list(kept.iterdir()))
        _start(target, "-merge=1", str(kept), str(found), "-verbosity=0")
        sys.stderr.write(f"corpus of {target}: {before} → {len(list(kept.iterdir()))} inputs\n")
        shutil.rmtree(found)
    return well


def main() -> int:
    """Exit code 1: an input broke a target."""
    if sys.argv[1:2] == ["--one"]:
        _one(sys.argv[2], sys.argv[3:])
    parser = argparse.ArgumentParser(
        prog="scripts/fuzz", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=5, help="for all targets together")
    parser.add_argument("--keep", action="store_true", help="grow the corpus in the repository")
    parser.add_argument("--again", nargs=2, metavar=("TARGET", "FILE"), help="run one input")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(TARGETS))
    options = parser.parse_args()
    if options.again:
        return _start(*options.again)
    chosen = options.targets or list(TARGETS)
    if unknown := set(chosen) - set(TARGETS):
        parser.error(f"no such target: {', '.join(unknown)}; there are {', '.join(TARGETS)}")
    seconds = max(1, round(options.minutes * 60 / len(chosen)))
    results = [_search(target, seconds, options.keep) for target in chosen]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
