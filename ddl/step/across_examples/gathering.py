"""Rows that `ddl.gather` returns in each of the three passes (`ddl.tasks.gather.Gathering`)."""

from collections.abc import Iterable, Iterator, Sequence

import tensorflow as tf

from ddl.errors import ConfigError
from ddl.microbatch import Microbatch
from ddl.seeds import drawn_by_state
from ddl.tasks.gather import Across, Gathered, positions_of


class OwnRowsKept:
    """Keeps the rows that a loss gathers. Nobody reads the loss itself.

    Attributes:
      kept: The tensors of all calls, [rows, …] each.
    """

    def __init__(self, all_rows: int, rows: Sequence[tf.Tensor] | None = None):
        """Keeps nothing yet.

        Args:
          all_rows: Number of rows of the global batch.
          rows: The gathered rows, if they are known.
        """
        self.kept: list[tf.Tensor] = []
        self._all_rows = all_rows
        self._rows = rows
        self._returned: list[tf.Tensor] = []

    def __call__(self, tensors: list[tf.Tensor], across: Across, current: Microbatch) -> Gathered:
        """Keeps the rows; returns those of the global batch, or else others of their shape.

        Raises:
          ConfigError: If what is gathered depends on rows that were gathered before, or on random
            numbers that each pass draws anew.
        """
        if _depends_on(tensors, self._returned):
            raise ConfigError(
                "With ACCUMULATION_STEPS > 1, ddl.gather must not take what was computed from rows "
                "that it returned: one pass over the microbatches gathers all. Gather them in one "
                "call, or set ACCUMULATION_STEPS = 1."
            )
        if draw := drawn_by_state(_leading_to(tensors)):
            raise ConfigError(
                "With ACCUMULATION_STEPS > 1, what ddl.gather takes must not depend on random "
                f"numbers of TensorFlow itself, got those of {draw}. The three passes over the "
                "microbatches would draw other numbers each, so the gradient would be wrong. "
                "Replace tf.random, tf.image.random_… and tf.nn.dropout with ddl.random, as in "
                "ddl.random.normal(self, x.shape), and with layers of ddl.layers or Keras, which "
                "repeat their numbers. Or set ACCUMULATION_STEPS = 1."
            )
        first = len(self.kept)
        self.kept += tensors
        if self._rows is None:
            times = self._all_rows // current.rows
            rows = [tf.tile(x, [times] + [1] * (x.shape.rank - 1)) for x in tensors]
        else:
            rows = list(self._rows[first : len(self.kept)])
        rows = [tf.stop_gradient(x) for x in rows]
        self._returned += rows
        return Gathered(rows, tf.ones([self._all_rows], tf.bool), positions_of(current))


class RowsGiven:
    """Gives a loss the rows of the global batch."""

    def __init__(self, rows: Sequence[tf.Tensor], mask: tf.Tensor):
        """Takes what to give.

        Args:
          rows: The tensors of all calls, [global batch, …] each.
          mask: bool [global batch], False for padding.
        """
        self._rows = list(rows)
        self._mask = mask

    def __call__(self, tensors: list[tf.Tensor], across: Across, current: Microbatch) -> Gathered:
        """Returns the rows of the next call."""
        rows, self._rows = self._rows[: len(tensors)], self._rows[len(tensors) :]
        return Gathered(rows, self._mask, positions_of(current))


def refuse(tensors: list[tf.Tensor], across: Across, current: Microbatch) -> Gathered:
    """Raises ConfigError: the rows of a microbatch depend on ACCUMULATION_STEPS."""
    raise ConfigError(refusal("ddl.gather"))


def refusal(where: str) -> str:
    """Returns the error of a gather that would return the rows of one microbatch.

    Args:
      where: Name of the part that gathers them.
    """
    return (
        f"{where} gathers the rows of one microbatch. With ACCUMULATION_STEPS > 1 these are a part "
        "of the global batch, so the loss would depend on ACCUMULATION_STEPS: each example would "
        "be compared with fewer others. Set ACCUMULATION_STEPS = 1, or pass "
        'across="global_batch" to ddl.gather in a loss, which takes three passes over the '
        "microbatches."
    )


def _depends_on(tensors: Iterable[tf.Tensor], earlier: Sequence[tf.Tensor]) -> bool:
    """Returns whether the graph leads from earlier tensors to others."""
    found = {id(one.op) for one in earlier}
    return bool(found) and any(id(operation) in found for operation in _leading_to(tensors))


def _leading_to(tensors: Iterable[tf.Tensor]) -> Iterator[tf.Operation]:
    """Returns all operations of the graph from which tensors are computed."""
    waiting = [one.op for one in tensors]
    seen: set[int] = set()
    while waiting:
        operation = waiting.pop()
        if id(operation) not in seen:
            seen.add(id(operation))
            yield operation
            waiting += [each.op for each in operation.inputs]
