"""Atomic replacement of files, synced to disk."""

import os
from collections.abc import Iterable
from pathlib import Path


def write_atomically(path: Path, content: str | bytes | Iterable[bytes]) -> None:
    """Replaces a file's content atomically: a crash leaves the old content or the new one.

    Args:
      path: The file.
      content: The new content; it may come in parts, so that the memory need not hold all.

    Raises:
      OSError: If the content cannot be written; the old content then stays. Or if the folder
        cannot be synced after the replacement.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        partial.unlink(missing_ok=True)  # left by a crash, or a link that somebody planted
        with partial.open("xb") as file:
            if isinstance(content, str):
                content = content.encode()
            for part in [content] if isinstance(content, bytes) else content:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    """Flushes a file's content or a folder's entries to disk. Raises OSError if it cannot."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
