"""Width and emphasis of what a command prints; a pipe gets plain text."""

import os
import shutil
import textwrap
from collections.abc import Sequence

from ddl.output import printable, standard_output

NARROWEST = 40
"""Least width: a narrower terminal wraps the lines itself."""


def width() -> int | None:
    """Returns the columns of the terminal; None if standard output is none and COLUMNS is not set.

    Without a width each line stays whole, so that grep finds all of it.
    """
    if not _is_terminal() and not os.environ.get("COLUMNS", "").isdecimal():
        return None
    return max(NARROWEST, shutil.get_terminal_size().columns)


def emphasized(text: str, code: str = "1") -> str:
    """Returns a text in bold, or in another style of the terminal; unchanged for other outputs.

    Args:
      text: The text; its control characters are escaped.
      code: The style: 1 bold, 2 faint, 31 red, 32 green.
    """
    if not _is_terminal() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return printable(text)
    return f"\033[{code}m{printable(text)}\033[0m"


def wrapped(text: str, columns: int | None, first: str = "", rest: str = "") -> list[str]:
    """Returns the lines of a paragraph. Words are never broken.

    Args:
      text: The paragraph; its control characters are escaped.
      columns: The width; None for a single line.
      first: Beginning of the first line.
      rest: Beginning of each other line.
    """
    text = printable(text)
    if columns is None:
        return [f"{first}{text}"]
    return textwrap.wrap(
        text,
        columns,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    ) or [first.rstrip()]


def fitting(text: str) -> str:
    """Returns a text whose lines are wrapped where they are wider than the terminal.

    The rest of a wrapped line is indented by two more than its beginning.

    Args:
      text: The text; its control characters but newlines are escaped.
    """
    columns = width()
    found = list[str]()
    for line in printable(text).split("\n"):
        indent = line[: len(line) - len(line.lstrip(" "))]
        fits = columns is None or len(line) <= columns
        found += [line] if fits else wrapped(line.strip(" "), columns, indent, f"{indent}  ")
    return "\n".join(found)


def wrapped_list(
    parts: Sequence[str], columns: int | None, first: str, rest: str, last: str
) -> list[str]:
    """Returns the lines of `first` part, part `last`, broken between the parts where needed.

    Args:
      parts: The parts; a comma follows all but the last one.
      columns: The width; None for a single line.
      first: Beginning of the first line.
      rest: Beginning of each other line.
      last: Text after the last part.
    """
    lines, line = list[str](), first
    for number, part in enumerate(parts):
        word = printable(part) + (last if number + 1 == len(parts) else ",")
        fresh = line in (first, rest)
        if columns is not None and not fresh and len(line) + 1 + len(word) > columns:
            lines.append(line)
            line, fresh = rest, True
        line += word if fresh else f" {word}"
    return [*lines, line if parts else first + last]


def _is_terminal() -> bool:
    return bool(standard_output().isatty())
