"""The text of `ddl show`: a config with its places, and the differences of two."""

import os
from collections.abc import Iterable, Iterator, Sequence

from ddl.cli.terminal import emphasized, wrapped
from ddl.config.explained.comparison import Comparison, Side
from ddl.config.explained.provenance import Provenance
from ddl.config.parsing import PACKAGE_FOLDER
from ddl.config.text import binding_line
from ddl.config.values import Location
from ddl.output import printable

# Greatest column of the places beside the values.
_FARTHEST = 48


def place(location: Location | None) -> str:
    """Returns a place as short as it can be: below the working directory, or in ddl."""
    if location is None:
        return "set by the program"
    if location.file is None:
        return str(location)
    path = os.path.abspath(location.file)
    for folder in (os.getcwd(), os.path.dirname(PACKAGE_FOLDER)):
        if path.startswith(folder + os.sep):
            return f"{os.path.relpath(path, folder)}:{location.line}"
    return f"{path}:{location.line}"


def history(entry: Provenance) -> str:
    """Returns the place of a value, and each value that it overrides with its place."""
    parts = [f"= {entry.value!r}"] if entry.has_macros else []
    parts.append(place(entry.binding.location))
    text = ", ".join(" ".join(part.split()) for part in parts)
    over = [f"{one.value!r} of {place(one.location)}" for one in entry.overridden]
    return f"{text}, overrides {', then '.join(over)}" if over else text


def config_lines(
    entries: Sequence[Provenance],
    imports: Sequence[str],
    defaults: Iterable[tuple[str, str]],
    columns: int | None,
) -> Iterator[str]:
    """Yields a config, with the history of each value as a comment.

    Args:
      entries: The values.
      imports: The imported modules.
      defaults: Name and text of each default to show below the values, as comments.
      columns: The width; None keeps each comment on its line.
    """
    yield from (f"import {module}" for module in imports)
    lines = [printable(binding_line(entry.name, entry.binding.value)) for entry in entries]
    limit = _FARTHEST if columns is None else min(_FARTHEST, columns // 2)
    ends = [len(line.splitlines()[-1]) for line in lines]
    column = max([end for end in ends if end <= limit], default=0)
    block = "" if imports else None
    for entry, line, end in zip(entries, lines, ends, strict=True):
        if block is not None and block != entry.block:
            yield ""
        block = entry.block
        yield from _with_comment(line, end, column, history(entry), columns)
    for number, (name, text) in enumerate(defaults):
        if not number:
            yield "\n# Defaults that no binding sets:"
        yield emphasized(f"# {name} = {text}", "2")


def _with_comment(
    line: str, end: int, column: int, comment: str, columns: int | None
) -> Iterator[str]:
    """Yields a binding with a comment, beside it where it fits, else below."""
    comment = printable(comment)
    gap = " " * (max(column - end, 0) + 2)
    if columns is None or end + len(gap) + 2 + len(comment) <= columns:
        yield line + gap + emphasized(f"# {comment}", "2")
    else:
        yield line
        for each in wrapped(comment, columns, "    # ", "    #   "):
            yield emphasized(each, "2")


def comparison_lines(
    comparison: Comparison,
    names: tuple[str, str],
    imports: tuple[Sequence[str], Sequence[str]],
    columns: int | None,
) -> Iterator[str]:
    """Yields how two configs differ: the name of each value, and both sides with their places.

    Args:
      comparison: The comparison.
      names: The names of the two configs.
      imports: The modules that each imports.
      columns: The width; None keeps each side on one line.
    """
    signs = (("-", "31"), ("+", "32"))
    for (sign, style), name in zip(signs, names, strict=True):
        yield emphasized(f"{sign * 3} {name}", style)
    for number, (sign, style) in enumerate(signs):
        for module in imports[number]:
            if module not in imports[1 - number]:
                yield emphasized(f"{sign} import {module}", style)
    for change in comparison.changes:
        yield emphasized(change.name)
        for (sign, style), side in zip(signs, (change.before, change.after), strict=True):
            for each in wrapped(_side(side), columns, f"  {sign} ", "      "):
                yield emphasized(each, style)
    different = len(comparison.changes)
    verb = "value differs" if different == 1 else "values differ"
    yield f"{different or 'No'} {verb}; {comparison.same} bound parameters have the same value."


def _side(side: Side) -> str:
    where = "default" if side.is_default else side.location and place(side.location)
    return f"{side.value}  # {where}" if where else side.value
