"""Reading of metrics.jsonl in chunks: a long run writes millions of lines.

A regular expression checks a whole chunk of lines in the form that ddl writes, faster than a JSON
parser. Other lines, such as those an editor saved, are parsed one by one.
"""

import json
import os
import re
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Any

from ddl.errors import ModelDirectoryError

_CHUNK = 2**20
_TEXT = rb'"[ !#-\[\]-~]*+"'
_NUMBER = rb"-?(?:0|[1-9]\d{0,300}+)(?:\.\d++)?+(?:[eE][-+]?\d++)?+"
_LINE = rb'\{"step": (?:0|[1-9]\d{0,14}+)(?:, %b: (?:%b|null|%b))*+\}\n' % (_TEXT, _NUMBER, _TEXT)
_LINES = re.compile(rb"(?:%b)*+" % _LINE)
_STEP = re.compile(rb'\{"step": (\d+)')


class Chunk:
    """Some whole lines of the file.

    Attributes:
      content: The lines, each with its newline.
      steps: The steps of the lines; None if a line has another form than ddl writes.
    """

    def __init__(self, content: bytes, path: Path, first_line: int):
        """Checks the lines.

        Args:
          content: The lines.
          path: The file, for errors.
          first_line: Number of the first line in the file, counted from 1.

        Raises:
          ModelDirectoryError: If ddl did not write a line.
        """
        self.content = content
        self._path = path
        self._first_line = first_line
        self.steps: set[int] | None = None
        if _LINES.fullmatch(content):
            self.steps = set(map(int, _STEP.findall(content)))
        else:
            for _ in self.lines():
                pass

    def lines(self) -> Iterator[tuple[bytes, dict[str, Any]]]:
        """Yields each line and its values; skips blank lines.

        Raises:
          ModelDirectoryError: If ddl did not write a line.
        """
        for number, line in enumerate(self.content.split(b"\n")[:-1], start=self._first_line):
            if not line.strip():
                continue
            values = parsed(line)
            if values is None:
                raise ModelDirectoryError(
                    f"{self._path}:{number} must be a JSON object with a step, as ddl writes it. "
                    "Correct or remove the line."
                )
            yield line + b"\n", values

    def until(self, last_step: int) -> bytes:
        """Returns the lines of steps up to `last_step`."""
        if self.steps is not None and max(self.steps, default=0) <= last_step:
            return self.content
        return b"".join(line for line, values in self.lines() if values["step"] <= last_step)


def chunks(path: Path) -> Iterator[Chunk]:
    """Yields the lines of a file that end in a newline; nothing if there is no file.

    Raises:
      ModelDirectoryError: If the file cannot be read, or ddl did not write a line.
    """
    first_line = 1
    try:
        with path.open("rb") as file:
            while content := file.read(_CHUNK):
                content += file.readline()
                content = content[: content.rfind(b"\n") + 1]
                yield Chunk(content, path, first_line)
                first_line += content.count(b"\n")
    except FileNotFoundError:
        return
    except OSError as error:
        raise ModelDirectoryError(
            f"{path} cannot be read: {error.strerror}. Restore the file from a backup, or pass "
            "another --model_dir."
        ) from error


def parsed(line: bytes) -> dict[str, Any] | None:
    """Parses a line; returns None if it is not one that ddl writes."""
    try:
        values = json.loads(line.decode())
        step = values["step"]
        valid = isinstance(step, int | float) and not isinstance(step, bool)
        return values if valid and step >= 0 and float(step).is_integer() else None
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


def start_of_last_line(file: FileIO) -> int:
    """Returns where the text after the last newline of a file begins."""
    end = file.seek(0, os.SEEK_END)
    while end > 0:
        start = max(0, end - _CHUNK)
        file.seek(start)
        place = file.read(end - start).rfind(b"\n")
        if place >= 0:
            return start + place + 1
        end = start
    return 0
