"""Memory of earlier trainers, which a notebook replaces when a cell runs again."""

import gc
import weakref
from collections.abc import Iterable
from typing import Any

from ddl.data.pipeline import BatchPipeline

_LIMIT = 1 << 26
"""Bytes of arrays that unused trainers may hold until Python collects them."""

# Trainers that Python has not freed yet, with the bytes of their arrays.
_HELD: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def free_unused() -> None:
    """Frees trainers that nothing uses, if trainers hold large arrays.

    A trainer refers to itself, so only Python's garbage collector frees it. The collector counts
    objects, not bytes, and may not run before the memory is full.
    """
    if sum(_HELD.values()) > _LIMIT:
        gc.collect()


def note_arrays(trainer: Any, pipelines: Iterable[BatchPipeline]) -> None:
    """Notes the arrays of a trainer for `free_unused`."""
    sources = {id(one.source): one.source for one in pipelines}.values()
    arrays = [a for one in sources for a in (getattr(one, "arrays", None) or {}).values()]
    _HELD[trainer] = sum(array.nbytes for array in arrays)
