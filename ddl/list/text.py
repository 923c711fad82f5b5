"""The text of `ddl list`: items in short and in full, flags, macros."""

import re
import textwrap
from collections.abc import Iterator, Sequence

from absl import flags

from ddl.cli.flags import help_of
from ddl.cli.terminal import emphasized, wrapped, wrapped_list
from ddl.config.explained.items import Item, Parameter
from ddl.config.explained.kinds import KINDS
from ddl.config.explained.macros import StandardMacro
from ddl.output import printable

_REST = "    "
# An entry of a docstring's section, whose next lines are indented deeper.
_ENTRY = re.compile(r"\*{0,2}`?[\w/]+`?(?: ?\([^)]*\))?: ")
# Lines that stay as they are: code, tables, lists.
_AS_IS = re.compile(r">>>|\.\.\.|```|\||[-*] ")


def in_short(item: Item, columns: int | None) -> Iterator[str]:
    """Yields name, parameters with types and defaults, and the first line of the docstring."""
    yield from _signature(item, columns)
    if item.summary:
        yield from wrapped(item.summary, columns, _REST, _REST)


def in_full(item: Item, columns: int | None) -> Iterator[str]:
    """Yields the signature, the kind, and the whole docstring."""
    yield from _signature(item, columns)
    if item.inherited:
        text = f"also takes the parameters of its base class: {', '.join(item.inherited)}"
        yield from wrapped(text, columns, _REST, _REST)
    about = f"{item.selector}, one of {item.kind}; in a config: @{item.name}()"
    yield from wrapped(about, columns, _REST, _REST)
    yield ""
    yield from (f"{_REST}{line}".rstrip() for line in reflowed(item.doc, columns and columns - 4))


def _signature(item: Item, columns: int | None) -> Iterator[str]:
    parts = [str(parameter) for parameter in item.parameters]
    if item.inherited:
        parts.append("…")
    lines = wrapped_list(parts, columns, f"{item.name}(", _REST * 2, ")")
    yield emphasized(item.name) + lines[0][len(item.name) :]
    yield from lines[1:]


def parameter_in_full(item: Item, parameter: Parameter, columns: int | None) -> Iterator[str]:
    """Yields a parameter with its type, its default and its documentation."""
    yield emphasized(f"{item.name}.{parameter}")
    text = parameter.doc or "The docstring does not describe this parameter."
    yield from wrapped(text, columns, _REST, _REST)
    if parameter.default is None:
        yield f"{_REST}A value is required."


def reflowed(doc: str, columns: int | None) -> list[str]:
    """Returns the lines of a docstring; if some are too long, with its paragraphs wrapped again."""
    lines = printable(doc).splitlines()
    if columns is None or all(len(line) <= columns for line in lines):
        return lines
    found, number, is_code = list[str](), 0, False
    while number < len(lines):
        line = lines[number]
        number += 1
        indent, text = _indent(line), line.strip()
        is_code ^= text.startswith("```")
        if is_code or not text or _AS_IS.match(text):
            found.append(line)
            continue
        is_entry = _ENTRY.match(text) is not None
        below = indent + 2 if is_entry else indent
        joined = list(_continued(lines[number:], below, is_entry))
        number += len(joined)
        found += textwrap.wrap(
            " ".join([text, *joined]),
            columns,
            initial_indent=" " * indent,
            subsequent_indent=" " * below,
            break_long_words=False,
            break_on_hyphens=False,
        )
    return found


def _continued(lines: Sequence[str], indent: int, of_entry: bool) -> Iterator[str]:
    """Yields the lines that continue a paragraph, without their indentation."""
    for line in lines:
        text = line.strip()
        begins_another = _AS_IS.match(text) or (_ENTRY.match(text) and not of_entry)
        if not text or _indent(line) != indent or begins_another:
            return
        yield text


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def kinds(items: Sequence[Item], others: dict[str, str], columns: int | None) -> Iterator[str]:
    """Yields each kind with the names of its items, of Keras's their number.

    Args:
      items: All items.
      others: The lists that are not of items, with the phrases that describe them.
      columns: The width; None for long lines.
    """
    for kind, phrase in KINDS.items():
        own = [item.name for item in items if item.kind == kind and item.origin != "keras"]
        of_keras = sum(item.kind == kind and item.origin == "keras" for item in items)
        if of_keras:
            own.append(f"{of_keras} of Keras")
        if own:
            yield f"{emphasized(kind)}: {phrase}"
            yield from wrapped_list(own, columns, _REST, _REST, "")
    for name, phrase in others.items():
        yield f"{emphasized(name)}: {phrase}"
    yield ""
    yield from wrapped(
        "ddl list KIND shows parameters, types and defaults; ddl list NAME the whole docstring of "
        "an item, a flag, a macro, or a parameter such as Trainer.clip_norm.",
        columns,
    )


def flag(one: flags.Flag, columns: int | None) -> Iterator[str]:
    """Yields a flag with its type, its default and its help."""
    default = f" = {one.default_as_str.strip(chr(39))}" if one.default not in (None, []) else ""
    lines = wrapped(f"--{one.name}: {_type(one)}{default}", columns, "", _REST * 2)
    name = f"--{one.name}"
    yield emphasized(name) + lines[0][len(name) :]
    yield from lines[1:]
    yield from wrapped(help_of(one), columns, _REST, _REST)


def _type(one: flags.Flag) -> str:
    if isinstance(one, flags.EnumFlag):
        return " | ".join(one.parser.enum_values)
    kind = {"string": "text", "comma separated list of strings": "text, separated by commas"}
    if isinstance(one, flags.MultiFlag):
        return "text, repeatable"
    found = one.flag_type()
    return kind.get(found, found)


def macro(one: StandardMacro, doc: str, columns: int | None) -> Iterator[str]:
    """Yields a macro with its default, the parameters that it sets, and their documentation.

    Args:
      one: The macro.
      doc: Documentation of the first parameter that it sets; may be empty.
      columns: The width; None for long lines.
    """
    yield emphasized(f"{one.name} = {one.default}")
    text = f"Sets {', '.join(one.sets)}." if one.sets else "For use in other bindings."
    for more in (f"{one.comment[:1].upper()}{one.comment[1:]}", doc):
        if more:
            text += f" {more}{'' if more.endswith('.') else '.'}"
    yield from wrapped(text, columns, _REST, _REST)
