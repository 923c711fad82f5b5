"""A hook through which `ddl.checking` reads the tensors of an update while it is traced.

In a normal run the only observer warns of operations that do not repeat their bits
(`ddl.step.monitoring.repetition`) and adds none to the graph. The events, in the order of the
computation:

    "update"      cross-replica   the trace of an update begins
    "gradients"   cross-replica   a gradient or a sum begins: loss, the name of the loss
    "rows"        replica         the rows of a microbatch: features
    "outputs"     replica         what the loss returned: name, output (`PerExample`)
    "reduced"     cross-replica   the gradient of the global batch: variables, reduced (`Reduced`)
    "summed"      cross-replica   the sum over the global batch: loss, value
    "apply"       cross-replica   an optimizer gets gradients: optimizer, gradients (`Gradients`)
    "applied"     cross-replica   the optimizer has changed the variables: the same arguments

"rows" and "outputs" also occur in an evaluation, where no "gradients" precedes them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

RECORDS = "recorded_values"
"""Scope of the operations of observers, which compute nothing that is trained."""


class Observer(Protocol):
    """Takes the events above. It may add operations to the graph that is being traced."""

    def __call__(self, event: str, **values: Any) -> None:
        """Takes an event with its values."""


# Not local to a thread: tf.distribute traces each replica in its own thread.
_observers: list[Observer] = []


def observe(event: str, **values: Any) -> None:
    """Passes an event to the observers, if there are any."""
    for observer in tuple(_observers):
        observer(event, **values)


@contextmanager
def observed_by(observer: Observer) -> Iterator[None]:
    """Passes the events of all traces in the `with` block to an observer."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)
