"""Turns a mistyped name into the question that a helpful colleague would ask."""

import difflib
from collections.abc import Iterable


def closest(word: str, candidates: Iterable[str], cutoff: float = 0.75) -> list[str]:
    """Returns up to three candidates that look like `word`, the most alike first.

    Case counts for nothing: `sgd` finds `SGD`.
    """
    by_lower: dict[str, str] = {}
    for candidate in candidates:
        by_lower.setdefault(candidate.lower(), candidate)
    found = difflib.get_close_matches(word.lower(), list(by_lower), n=3, cutoff=cutoff)
    return [by_lower[match] for match in found if by_lower[match] != word]


def either(names: Iterable[str]) -> str:
    """Joins names as `a`, `a or b`, `a, b or c`."""
    *most, last = names
    return f"{', '.join(most)} or {last}" if most else last


def did_you_mean(word: str, candidates: Iterable[str]) -> str:
    """Returns ` Did you mean x?` (with its leading space), or nothing when nothing is close."""
    found = closest(word, candidates)
    return f" Did you mean {either(found)}?" if found else ""
