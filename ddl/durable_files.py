"""Small files written whole or not at all, and on the disk when a call returns."""

import os
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    """Replaces the file's content in one step: a crash leaves the old content or the new one.

    Raises:
      OSError: If it cannot be written; the old content stays.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    """Waits until a file's content, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
