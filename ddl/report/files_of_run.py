"""Reading of the small files of a run, and of its lock."""

import json
import os
from pathlib import Path

from ddl.files import open_itself
from ddl.output import printable
from ddl.run.directory import sanity_mode_of

__all__ = ["is_locked", "reason_of", "sanity_mode_of", "text_in"]


def text_in(path: Path, largest: int, cut: bool = False) -> str:
    """Reads a UTF-8 file.

    Args:
      path: The file.
      largest: The most bytes to read.
      cut: Whether to return the beginning of a larger file; what is not UTF-8 is then replaced.

    Raises:
      OSError: If it cannot be read, or is a link.
      ValueError: If it is too large, unless it may be cut, or is not UTF-8.
    """
    with open(path, "rb", opener=open_itself) as file:
        content = file.read(largest + 1)
    if len(content) > largest and not cut:
        raise ValueError(f"it has more than {largest:,} bytes")
    return content[:largest].decode(errors="replace" if cut else "strict")


def reason_of(error: Exception) -> str:
    """Returns why a file could not be read, as a part of a sentence."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8"
    if isinstance(error, json.JSONDecodeError | RecursionError):
        return "it is not valid JSON"
    return printable(str(error)) or type(error).__name__


def is_locked(path: Path, locks: Path = Path("/proc/locks")) -> bool:
    """Returns whether a process of this machine trains in a directory, as its lock tells.

    Taking the lock would keep a run from starting at this moment, so Linux's list of locks is read.
    On other systems, and for processes on other machines, the answer is no.

    Args:
      path: The directory.
      locks: The list of locks.
    """
    try:
        inode, device = (status := path.stat()).st_ino, status.st_dev
        place = f"{os.major(device):02x}:{os.minor(device):02x}:{inode}"
        lines = locks.read_text().splitlines()
    except (OSError, ValueError):
        return False
    return any("FLOCK" in line and "WRITE" in line and place in line.split() for line in lines)
