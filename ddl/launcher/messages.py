"""Lines that the launcher prints: its own, and those of its processes. None of them raises."""

from collections.abc import Iterable

from ddl import output


def say(text: str) -> None:
    """Prints one of the launcher's own lines to standard error."""
    output.say(text, "ddl-launch")


def show(lines: Iterable[str]) -> None:
    """Prints lines of a process to standard output."""
    _print(output.standard_output(), lines)


def quote(lines: Iterable[str]) -> None:
    """Prints lines of a log to standard error, indented."""
    _print(output.standard_error(), (f"  {line}" for line in lines))


def _print(stream: output.Dropping, lines: Iterable[str]) -> None:
    stream.writelines(f"{line}\n" for line in lines)
    stream.flush()
