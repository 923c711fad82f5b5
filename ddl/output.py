"""Standard output and standard error. A write that fails never ends a run.

The disk may be full, the reader of a pipe may have ended, and an encoding may lack a character.
`FailSafeStream` drops what cannot be written and reports the first failure of each stream once: on
standard error or, if that fails too, in a file of the run's directory.
"""

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO, cast

from ddl.files import open_itself

FAILURES_FILE = "output_errors.txt"
"""File in the run's directory with the reports that standard error could not take."""

_NAMES = {"stdout": "Standard output", "stderr": "Standard error"}
# ASCII for the characters of ddl's own lines; all others are escaped.
_PLAIN = str.maketrans({"·": "-", "×": "x", "…": "...", "–": "-", "\N{MINUS SIGN}": "-"})


class FailSafeStream:
    """A text stream that drops what it cannot write, instead of raising.

    All other attributes are those of the wrapped stream.

    Attributes:
      failed: Whether a write has failed.
    """

    def __init__(self, stream: TextIO, name: str = "The output"):
        """Wraps a stream.

        Args:
          stream: The stream to write to.
          name: Name of the stream in a report.
        """
        self._stream = stream
        self._name = name
        self.failed = False

    def write(self, text: str) -> int:
        """Writes a text; replaces characters that the encoding lacks. Never raises."""
        try:
            try:
                self._stream.write(text)
            except UnicodeEncodeError:
                encoding = self._stream.encoding or "ascii"
                plain = text.translate(_PLAIN).encode(encoding, "backslashreplace")
                self._stream.write(plain.decode(encoding))
        except (OSError, ValueError) as error:  # ValueError: the stream is closed
            self._fail(error)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Writes each text. Never raises."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Flushes the stream. Never raises."""
        try:
            self._stream.flush()
        except (OSError, ValueError) as error:
            self._fail(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _fail(self, error: Exception) -> None:
        if not self.failed:
            self.failed = True
            _REPORTS.add(self._name, error)
        _REPORTS.deliver()


class _Reports:
    """Reports of failed streams, until they are delivered. One per process, as the streams are."""

    def __init__(self) -> None:
        self.program = "ddl"
        self.quiet = False
        self.folder: Path | None = None
        self._waiting: list[str] = []

    def add(self, name: str, error: Exception) -> None:
        if self.quiet and isinstance(error, BrokenPipeError):
            return
        reason = (isinstance(error, OSError) and error.strerror) or str(error)
        text = f"{name} cannot be written: {reason}. {self.program} continues without it."
        self._waiting.append(f"{self.program}: {text}\n")

    def deliver(self) -> None:
        """Delivers what it can; a folder of the run that is not there yet is tried again later."""
        while self._waiting:
            text = self._waiting.pop(0)
            stream = standard_error()
            if not stream.failed:
                stream.write(text)
                stream.flush()
            if stream.failed and not self._append(text):
                self._waiting.insert(0, text)
                return

    def _append(self, text: str) -> bool:
        if self.folder is None:
            return False
        try:
            with open(self.folder / FAILURES_FILE, "a", opener=open_itself) as file:
                file.write(text)
        except FileNotFoundError:
            return False
        except OSError:
            pass  # no place is left to report this
        return True


_REPORTS = _Reports()
# The wrapped standard streams, with the streams that they wrap.
_WRAPPED: dict[str, tuple[TextIO | None, FailSafeStream]] = {}


def protect_standard_streams(program: str, quiet: bool = False) -> None:
    """Makes sys.stdout and sys.stderr fail-safe for the rest of the process.

    A standard stream that is closed is opened on /dev/null: a file opened later would otherwise get
    its descriptor, and the messages of libraries.

    Args:
      program: Name of the command, for messages.
      quiet: Whether a reader that ends, as `head` does, goes unreported.
    """
    _REPORTS.program, _REPORTS.quiet = program, quiet
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free descriptor
    sys.stdout = cast(TextIO, _standard("stdout"))
    sys.stderr = cast(TextIO, _standard("stderr"))


def report_failures_in(folder: Path) -> None:
    """Sets the folder for reports that standard error cannot take. The folder may come later."""
    _REPORTS.folder = folder
    _REPORTS.deliver()


def standard_output() -> FailSafeStream:
    """Returns standard output as it is now, as a fail-safe stream."""
    return _standard("stdout")


def standard_error() -> FailSafeStream:
    """Returns standard error as it is now, as a fail-safe stream."""
    return _standard("stderr")


def _standard(name: str) -> FailSafeStream:
    stream = getattr(sys, name)
    if isinstance(stream, FailSafeStream):
        return stream
    if name not in _WRAPPED or _WRAPPED[name][0] is not stream:
        # A standard stream is None if it was closed before Python started.
        open_stream = open(os.devnull, "w") if stream is None else stream  # noqa: SIM115
        _WRAPPED[name] = stream, FailSafeStream(open_stream, _NAMES[name])
    return _WRAPPED[name][1]


def say(text: str, program: str | None = None) -> None:
    """Prints one of a program's own lines to standard error. Never raises.

    Args:
      text: The line, or lines.
      program: The program that says it; None for the command that this process runs.
    """
    stream = standard_error()
    stream.write(f"{program or _REPORTS.program}: {printable(text)}\n")
    stream.flush()


def printable(text: str) -> str:
    """Escapes control characters, which a terminal obeys; keeps newlines and tabs."""
    if text.isprintable():
        return text
    return "".join(
        one if one.isprintable() or one in "\n\t" else one.encode("unicode_escape").decode()
        for one in text
    )
