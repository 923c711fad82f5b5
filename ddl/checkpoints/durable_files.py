"""Atomic replacement of files and folders, synced to disk."""

import ctypes
import os
import shutil
import sys
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

# For Linux's renameat2: paths relative to the working directory; exchange the two names.
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


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


def replace_folder(new: Path, path: Path) -> None:
    """Replaces the folder `path` by the folder `new`; the earlier folder, if any, moves to `new`.

    A crash leaves one of the two whole at `path`. If the file system cannot exchange two names, a
    crash may leave `path` missing until `recover_folder` is called.

    Args:
      new: The new folder; it is first synced to disk with all its files.
      path: The folder to replace, on the same file system.

    Raises:
      OSError: If the new folder cannot be synced or moved; both folders are then unchanged. Or if
        a step after that move fails.
    """
    for folder, _, files in os.walk(new):
        for each in (*files, "."):
            sync(Path(folder, each))
    if path.exists():
        try:
            _exchange(new, path)
        except OSError:
            _exchange_in_steps(new, path)
    else:
        os.rename(new, path)
    sync(path.parent)


def recover_folder(new: Path, path: Path) -> None:
    """Cleans up after a crash in `replace_folder`: removes `new`, and restores `path` if missing.

    Raises:
      OSError: If a folder cannot be removed or renamed.
    """
    if new.exists():
        shutil.rmtree(new)
    aside = _aside(path)
    if aside.exists() and not path.exists():
        os.rename(aside, path)
    elif aside.exists():
        os.rename(aside, new)  # a crash while removing it must not leave a part as `aside`
        shutil.rmtree(new)


def _exchange(one: Path, other: Path) -> None:
    """Exchanges two names atomically. Raises OSError if the system or file system cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        raise OSError(0, "this system cannot exchange two names")
    paths = os.fsencode(one), os.fsencode(other)
    if libc.renameat2(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _exchange_in_steps(new: Path, path: Path) -> None:
    aside = _aside(path)
    os.rename(path, aside)
    try:
        os.rename(new, path)
    except BaseException:
        with suppress(OSError):
            os.rename(aside, path)
        raise
    os.rename(aside, new)


def _aside(path: Path) -> Path:
    return path.with_name(path.name + ".replaced")


def be_polite() -> None:
    """Lowers this thread's priority: an update uses all cores and waits for the slowest."""
    if sys.platform == "linux":  # Linux has a priority for each thread
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
