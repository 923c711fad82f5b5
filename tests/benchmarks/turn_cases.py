"""Contenders for test_turns.py and test_beside_rivals.py, in a module that processes can import."""

import os

from benchmarks.turns import Failed, Turns


def contender(case: str, turns: Turns) -> None:
    """Does what the case says."""
    if case == "fails":
        raise Failed("skipped: why")
    if case == "breaks":
        raise ZeroDivisionError("by zero\nand more")
    if case == "dies":
        os._exit(3)
    turns.take(lambda: None)


def skips(case: str, turns: Turns) -> None:
    """Fails in each case."""
    raise Failed("no such package")
