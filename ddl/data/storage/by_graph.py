"""Reading by TensorFlow's operations alone, for workers that run no Python of the program."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_alone = ContextVar("by graph alone", default=False)


@contextmanager
def by_graph_alone() -> Iterator[None]:
    """Makes sources that can read in Python or in a graph use the graph, while they are traced."""
    token = _alone.set(True)
    try:
        yield
    finally:
        _alone.reset(token)


def is_by_graph_alone() -> bool:
    """Returns whether the code runs within `by_graph_alone`."""
    return _alone.get()
