"""Log files of processes, readable while the processes write to them."""

import os
from pathlib import Path
from typing import BinaryIO

from ddl.files import open_itself
from ddl.launcher.messages import say

_LAST_BYTES = 1 << 16


class ProcessLog:
    """A log that the process appends to directly, so that no output is lost when either ends."""

    def __init__(self, path: Path, heading: str):
        """Opens the file for appending and writes the heading.

        A heading that cannot be written is reported.

        Raises:
          OSError: If the file cannot be opened.
        """
        self.path = path
        # The process writes to this one. Both stay open, so that removing the file does no harm.
        self.writing: BinaryIO = open(path, "ab", buffering=0, opener=open_itself)  # noqa: SIM115
        self._reading: BinaryIO = path.open("rb")
        between = "\n" if os.fstat(self.writing.fileno()).st_size else ""
        try:
            self.writing.write(f"{between}{heading}\n".encode())
        except OSError as error:  # a full disk must not end a restart
            say(f"{path} cannot be written: {error.strerror}. Output of this process may be lost.")
        self._start = self._shown = os.fstat(self.writing.fileno()).st_size

    def new_lines(self, *, to_the_end: bool = False) -> list[str]:
        """Returns the lines written since the last call, without an unfinished last line.

        Args:
          to_the_end: Whether to return an unfinished last line too.
        """
        self._reading.seek(self._shown)
        written = self._reading.read()
        if not to_the_end:
            written = written[: written.rfind(b"\n") + 1]
        self._shown += len(written)
        return _lines(written)

    def last_lines(self, count: int) -> list[str]:
        """Returns up to `count` last lines of this process, none of an earlier process."""
        size = os.fstat(self._reading.fileno()).st_size
        self._reading.seek(max(self._start, size - _LAST_BYTES))
        return _lines(self._reading.read())[-count:]

    def close(self) -> None:
        """Closes the file."""
        self.writing.close()
        self._reading.close()


def _lines(written: bytes) -> list[str]:
    text = written.decode(errors="replace")
    return [line.rstrip("\r") for line in text.removesuffix("\n").split("\n")] if text else []
