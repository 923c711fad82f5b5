"""Numbers, texts and methods of a task that the user's code reads while it is traced.

The graph holds their values and their code, so a later change has no effect: see `fixed_settings`.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ddl.training.checks.task_code import TRACED, methods_among
from ddl.user_code import is_of_library

_PLAIN = (bool, int, float, complex, str, bytes, np.ndarray, np.generic)


class ReadAttributes:
    """Names of the attributes of an object that the user's code reads, but does not change.

    The names of its methods that are traced are among them.
    """

    def __init__(self, holder: Any):
        """Keeps the object; notes nothing yet."""
        self._holder = holder
        self.names: frozenset[str] = frozenset()

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Notes what is read within the `with` block, from any thread.

        An attribute that the block changes, such as a count of traces, is a record and is left out.
        """
        holder, read = self._holder, set[str]()
        cls: Any = type(holder)
        before = plain_attributes(holder)
        own, get = vars(cls).get("__getattribute__"), cls.__getattribute__

        def noting(instance: Any, name: str) -> Any:
            if instance is holder and not is_of_library(sys._getframe(1).f_code.co_filename):
                read.add(name)
            return get(instance, name)

        try:
            cls.__getattribute__ = noting
        except TypeError:  # of a class without Python code, such as types.SimpleNamespace
            yield
            return
        try:
            yield
        finally:
            if own is None:
                del cls.__getattribute__
            else:
                cls.__getattribute__ = own
        after = plain_attributes(holder)
        same = {name for name in before if name in after and _equal(before[name], after[name])}
        self.names = frozenset(read & same) | methods_among(holder, {*read, *TRACED})


def plain_attributes(holder: Any) -> dict[str, Any]:
    """Returns the numbers, texts and arrays among an object's own attributes."""
    own = getattr(holder, "__dict__", {})
    return {name: value for name, value in own.items() if isinstance(value, _PLAIN)}


def _equal(one: Any, other: Any) -> bool:
    return one is other or bool(np.array_equal(one, other))
