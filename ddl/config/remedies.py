"""Remedies for config lines that cannot be parsed and for files that are not found."""

import ast
import os
import re
import unicodedata
from collections.abc import Sequence

_VALUES = {
    **{word: "True" for word in ("true", "TRUE", "yes", "on")},
    **{word: "False" for word in ("false", "FALSE", "no", "off")},
    **{word: "None" for word in ("none", "NONE", "null", "nil")},
}
_DECIMAL_COMMA = re.compile(r"=\s*(-?\d+),(\d+)\s*(?:#.*)?$")
_GROUPED = re.compile(r"-?\d{1,3}(?: \d{3})+(?:\.\d+)?")
_COMPUTES = re.compile(r"[-+*/]")


def for_statement(reason: str, line: str) -> str:
    """Returns the message for a statement that gin's parser rejects.

    Args:
      reason: Message of gin's parser.
      line: The line, or the whole `--gin_param`.
    """
    if strange := _strange_character(line):
        return strange
    token = re.search(r"Failed to parse token '(\w+)'", reason)
    if token:
        return _for_word(token[1])
    if "Couldn't parse statement" in reason:
        return "Expected NAME = value."
    reason = re.sub(r"\s+", " ", reason).rstrip(". ")
    return f"Cannot parse this statement: {reason}.{_for_line(line)}"


def _for_word(word: str) -> str:
    if word in _VALUES:
        return f"{word} is not a value. Write {_VALUES[word]}."
    return (
        f"{word} is not a value. Write '{word}' for a string, %{word} for a macro, or @{word}() "
        "for a call."
    )


def _strange_character(line: str) -> str:
    """Returns a message for the first character that only looks like one of Python's."""
    for place, character in enumerate(line):
        kind = unicodedata.category(character)
        if not character.isascii() and kind[0] in "ZPSC" and not _is_quoted(line, place):
            name = unicodedata.name(character, "a control character").lower()
            plain = "a space" if kind[0] == "Z" else "the plain character of the keyboard"
            return (
                f"Column {place + 1} has the character {name} (U+{ord(character):04X}). Replace it "
                f"by {plain}, or remove it."
            )
    return ""


def _is_quoted(line: str, place: int) -> bool:
    before = line[:place]
    return before.count("'") % 2 == 1 or before.count('"') % 2 == 1 or "#" in before


def _for_line(line: str) -> str:
    """Returns the remedy for a value that is followed by more; empty if none is known."""
    if comma := _DECIMAL_COMMA.search(line):
        whole, part = comma.groups()
        return f" Write {whole}.{part} for a number, or ({whole}, {int(part)}) for two."
    name, _, value = line.partition("=")
    if ";" in (value or name):
        return " Remove the ;. Each binding has a line of its own."
    if (not value and ":" in name) or not name.strip():
        return " Write NAME = value."
    computed = value.partition("#")[0].strip()
    if not computed and "=" in line:
        return " Write a value after the =."
    if _GROUPED.fullmatch(computed):
        return f" Write {computed.replace(' ', '')}, without spaces."
    if _COMPUTES.search(computed) and _is_expression(computed):
        return " gin evaluates no expressions. Write the result."
    return ""


def _is_expression(text: str) -> bool:
    try:
        return isinstance(ast.parse(text, mode="eval").body, ast.BinOp)
    except SyntaxError:
        return False


def for_missing_file(name: str, paths: Sequence[str], is_flag: bool) -> str:
    """Returns the remedy for a config file that is not found, with its leading space; or "".

    Args:
      name: Name of the file, as given.
      paths: Where it was searched.
      is_flag: Whether `--gin_file` gave the name.
    """
    for path in paths:
        if os.path.isdir(path):
            files = sorted(entry for entry in os.listdir(path) if entry.endswith(".gin"))
            example = f", such as {os.path.join(path, files[0])}" if files else ""
            return f" There is a folder of this name. Name a file in it{example}."
        if os.path.exists(path):  # processes of one run would each read a part of it
            return (
                " There is a pipe or device of this name, but a config must be a regular file, "
                "which every process of a run can read. Write its text to a file first."
            )
    if is_flag and "," in name:
        each = " ".join(f"--gin_file={one.strip()}" for one in name.split(","))
        return f" Pass one flag for each file: {each}."
    return ""
