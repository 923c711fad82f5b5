"""What a process writes to its log file, read again while it writes."""

import os
from pathlib import Path
from typing import BinaryIO

_LAST_BYTES = 1 << 16


class ProcessLog:
    """One file, which a process appends to directly: nothing is lost however either one ends."""

    def __init__(self, path: Path, heading: str):
        """Opens the file, after what earlier processes have left there, and writes the heading.

        Raises:
          OSError: If that is not possible.
        """
        self.path = path
        # For the process to write to. Both stay open, so that a file that somebody removes does
        # no harm.
        self.writing: BinaryIO = path.open("ab", buffering=0)
        self._reading: BinaryIO = path.open("rb")
        between = "\n" if os.fstat(self.writing.fileno()).st_size else ""
        self.writing.write(f"{between}{heading}\n".encode())
        self._start = self._shown = os.fstat(self.writing.fileno()).st_size

    def new_lines(self, *, to_the_end: bool = False) -> list[str]:
        """What was written since the last call, less a line that has no end yet.

        Args:
          to_the_end: Takes such a line too.
        """
        self._reading.seek(self._shown)
        written = self._reading.read()
        if not to_the_end:
            written = written[: written.rfind(b"\n") + 1]
        self._shown += len(written)
        return _lines(written)

    def last_lines(self, count: int) -> list[str]:
        """The last lines that the process wrote, without those of earlier ones."""
        size = os.fstat(self._reading.fileno()).st_size
        self._reading.seek(max(self._start, size - _LAST_BYTES))
        return _lines(self._reading.read())[-count:]

    def close(self) -> None:
        """Reads no more."""
        self.writing.close()
        self._reading.close()


def _lines(written: bytes) -> list[str]:
    text = written.decode(errors="replace")
    return [line.rstrip("\r") for line in text.removesuffix("\n").split("\n")] if text else []
