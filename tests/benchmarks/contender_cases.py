"""Contenders for test_harness.py, in a module that processes can import."""

import os

from benchmarks.harness import Failed


def contender(case: str):
    """Does what the case says."""
    if case == "fails":
        raise Failed("skipped: why")
    if case == "breaks":
        raise ZeroDivisionError("by zero\nand more")
    if case == "dies":
        os._exit(3)
    return lambda: float(os.environ.get("VALUE", case))
