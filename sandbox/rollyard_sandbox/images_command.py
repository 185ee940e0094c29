"""``rollyard images``: what guest images there are on this machine, and removing old ones."""

import argparse
import json
import sys

from rollyard._cli_output import end_with
from rollyard_sandbox import images
from rollyard_sandbox.images import StoredImage
from rollyard_sandbox.settings import WorkerSettings, explained

_UNITS_S = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))


def _age(seconds: float) -> str:
    for unit, length_s in _UNITS_S:
        if seconds >= length_s:
            return f"{seconds // length_s:.0f} {unit} ago"
    return "now"


def _line(image: StoredImage, size_bytes: int) -> str:
    age = _age(image.idle_s)
    use = "  in use" if image.in_use else ""
    return f"{image.path.name:<26} {size_bytes / 1e6:6.0f} MB  {age:>10}{use}"


def _as_json(image: StoredImage, size_bytes: int) -> dict[str, str | int | bool]:
    return {
        "path": str(image.path),
        "size_bytes": size_bytes,
        "last_used": image.used.isoformat(timespec="seconds"),
        "in_use": image.in_use,
    }


def main() -> int:
    """Exit code 0: listed, or removed what could go; 2: wrong settings; 3: some stay."""
    parser = argparse.ArgumentParser(
        prog="rollyard images", description="List the guest images of this machine."
    )
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    parser.add_argument("--prune", action="store_true", help="remove those that nobody needs")
    parser.add_argument("--dry-run", action="store_true", help="with --prune: only name them")
    parser.add_argument("--keep", type=int, default=images.KEPT, help="of each Python version")
    options = parser.parse_args()
    try:
        folder = WorkerSettings().state_dir / "images"
    except ValueError as error:
        sys.stderr.write(f"rollyard images: {explained(error)}\n")
        return 2
    if not options.prune:
        rows = [(image, image.size_bytes()) for image in images.stored_images(folder)]
        rows = [row for row in rows if row[0].path.exists()]  # some went meanwhile
        if options.json:
            sys.stdout.write(json.dumps([_as_json(*row) for row in rows], indent=2) + "\n")
            return 0
        lines = [_line(*row) for row in rows]
        total = sum(size for _, size in rows) / 1e6
        lines.append(f"{len(rows)} images in {folder}, {total:.0f} MB")
        sys.stdout.write("\n".join(lines) + "\n")
        return 0
    going: list[tuple[StoredImage, int]] = []
    failed: OSError | None = None

    def going_to(image: StoredImage) -> None:
        going.append((image, image.size_bytes()))

    try:
        if options.dry_run:
            for image in images.expendable(folder, keep=options.keep):
                going_to(image)
        else:
            images.prune(folder, keep=options.keep, before=going_to)
    except OSError as error:
        failed = error
        going = [one for one in going if not one[0].path.exists()]
    for image, size_bytes in going:
        sys.stdout.write(_line(image, size_bytes) + "\n")
    done = "would be removed" if options.dry_run else "removed"
    total = sum(size for _, size in going) / 1e6
    sys.stdout.write(f"{len(going)} images {done}, {total:.0f} MB\n")
    if failed:
        sys.stderr.write(f"rollyard: cannot remove images: {failed}\n")
        return 3
    return 0


if __name__ == "__main__":
    end_with(main)
