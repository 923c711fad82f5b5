"""Contenders for test_turns.py, in a module that processes can import."""

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
