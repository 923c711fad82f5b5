"""The code of a task's methods, which a notebook replaces in place when a module is edited.

A graph holds the code as it was traced: see `fixed_settings`.
"""

import dataclasses
import inspect
import types
from collections.abc import Iterable
from typing import Any

from ddl.user_code import Place, is_of_library

TRACED = ("per_example", "step", "evaluate")
"""Methods of a task that the loops trace."""


@dataclasses.dataclass(frozen=True)
class Code:
    """Code of the functions of one name, in the classes of a task that are not of a library.

    Attributes:
      content: Instructions and constants, without lines: other parts of a module may move them.
      place: Where the first function is.
    """

    content: tuple[Any, ...]
    place: Place = dataclasses.field(compare=False)

    def __repr__(self) -> str:
        return f"the code at {self.place}"


def code_of_method(task: Any, name: str) -> Code | None:
    """Returns the code of a task's method; None if no class of the user's has it in Python.

    Args:
      task: The task.
      name: Name of the method.
    """
    codes = [_code(vars(cls).get(name)) for cls in type(task).__mro__]
    found = [code for code in codes if code is not None and not is_of_library(code.co_filename)]
    if not found:
        return None
    place = Place(found[0].co_filename, found[0].co_firstlineno)
    return Code(tuple(map(_content, found)), place)


def code_of_methods(task: Any) -> tuple[Code | None, ...]:
    """Returns the code of all methods of a task."""
    names = {name: None for cls in type(task).__mro__ for name in vars(cls)}
    return tuple(code_of_method(task, name) for name in names)


def methods_among(task: Any, names: Iterable[str]) -> frozenset[str]:
    """Returns the names that are those of the task's methods."""
    return frozenset(name for name in names if code_of_method(task, name) is not None)


def _code(method: Any) -> types.CodeType | None:
    method = getattr(method, "__func__", method)  # of a static method or a class method
    method = getattr(method, "python_function", method)  # of a tf.function
    return getattr(inspect.unwrap(method), "__code__", None) if callable(method) else None


def _content(code: types.CodeType) -> tuple[Any, ...]:
    constants = (_content(x) if isinstance(x, types.CodeType) else x for x in code.co_consts)
    # Of 1 and 1.0, and of 0.0 and -0.0, the text differs alone.
    return (code.co_code, tuple(map(repr, constants)), code.co_names, code.co_varnames)
