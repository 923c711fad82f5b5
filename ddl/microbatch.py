"""Which rows of which global batch a replica is computing: what layers may ask while they run.

Two kinds of layers must know more than their input to compute the same on any number of
replicas: those that draw random numbers, which depend on an example's position in the global
batch, and those that take statistics, which leave padding out. The trainer says it around the
task's forward pass; outside of a trainer there is no current microbatch.
"""

import dataclasses
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from ddl.errors import ConfigError

# Replicas are traced in threads of their own.
_OF_THREAD = threading.local()


def current() -> "Microbatch | None":
    """The microbatch that this thread traces a forward or backward pass of; None outside."""
    return getattr(_OF_THREAD, "microbatch", None)


@contextmanager
def explaining_stale_traces() -> Iterator[None]:
    """Says what to do where a task or model holds tensors of an earlier trace.

    Raises:
      ConfigError: In place of TensorFlow's error.
    """
    try:
        yield
    except (TypeError, ValueError) as error:
        if "out of scope" not in str(error):
            raise
        raise ConfigError(
            "the task or the model uses a tensor of an earlier trace, kept on an attribute or by a "
            "tf.function of its own that another trainer traced, or a call in training beforehand. "
            "Make task and model anew for each Trainer, keep no tensors, and leave such a "
            f"tf.function out: the trainer compiles the whole step. ({str(error).splitlines()[0]})"
        ) from error


@dataclasses.dataclass
class _Calls:
    """How often an object drew. It is held, so that its id is not given to another."""

    owner: Any
    place: int
    count: int = 0


@dataclasses.dataclass(kw_only=True)
class Microbatch:
    """The rows that one replica computes at once. Replica context.

    Attributes:
      seed: Of all that is drawn.
      training: Whether the pass is one of training or of evaluation, which draw apart.
      counter: uint64 [2], what `ddl.random.batch_counter` gives for the global batch.
      first_row: Position of the first row in the global batch, int64 [] or a Python integer. The
        rows follow one another there.
      rows: How many they are; static.
      mask: bool [rows], False for padding and for examples that the data give the weight 0;
        None if there is neither.
    """

    seed: int
    training: bool
    counter: tf.Tensor
    first_row: tf.Tensor | int
    rows: int
    mask: tf.Tensor | None = None
    _calls: dict[int, _Calls] = dataclasses.field(default_factory=dict)
    _is_backward: bool = False

    def __post_init__(self) -> None:
        self._graph = tf.compat.v1.get_default_graph()

    @property
    def batch(self) -> tf.Tensor:
        """Number of the global batch, counted over the whole run: int64 []."""
        return tf.cast(self.counter[1], tf.int64)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Makes this the current microbatch."""
        earlier = current()
        _OF_THREAD.microbatch = self
        try:
            yield
        finally:
            _OF_THREAD.microbatch = earlier

    @contextmanager
    def backward(self) -> Iterator[None]:
        """The same while gradients are traced: what is recomputed draws what it drew before."""
        self._is_backward = True
        try:
            with self.forward():
                yield
        finally:
            self._is_backward = False

    @property
    def in_loop(self) -> bool:
        """Whether the model has a loop on tensors around what is being traced.

        A loop is traced once and run often: what is numbered while tracing would repeat in it.
        """
        graph = tf.compat.v1.get_default_graph()
        while graph is not self._graph and graph is not None:
            if type(graph).__name__ == "WhileBodyFuncGraph":
                return True
            graph = getattr(graph, "outer_graph", None)
        return False

    def rows_per_example(self, rows: Any, asking: str) -> int:
        """How many of a layer's rows belong to an example, where a model splits examples.

        Args:
          rows: How many rows the layer has; a tensor where that is not static.
          asking: Who asks, for the error.

        Raises:
          ConfigError: If it cannot be known which example a row belongs to.
        """
        if not isinstance(rows, int) or rows < self.rows or rows % self.rows:
            number = rows if isinstance(rows, int) else "an unknown number of"
            raise ConfigError(
                f"{asking} has {number} rows for {self.rows} examples: which example they belong "
                "to cannot be known. Keep the batch as the first dimension, or examples in parts "
                "that follow one another."
            )
        return rows // self.rows

    def call_number(self, owner: Any) -> tuple[int, int]:
        """Counts the draws of a layer in this pass, to tell them apart.

        Args:
          owner: The layer, or another object that draws.

        Returns:
          Its place in the order of first draws, which is the same on every replica and in every
          run of the same model; and how often it drew before in this pass.

        Raises:
          ConfigError: If what is recomputed for the backward pass (tf.recompute_grad) did not draw
            exactly once in the forward pass: which of its draws is meant cannot be known.
        """
        calls = self._calls.setdefault(id(owner), _Calls(owner, place=len(self._calls)))
        if not self._is_backward:
            calls.count += 1
            return calls.place, calls.count - 1
        if calls.count != 1:
            raise ConfigError(
                f"{getattr(owner, 'name', owner)!r} drew random numbers {calls.count} times and is "
                "recomputed for the backward pass (tf.recompute_grad), where it draws what it drew "
                "before. Use a layer of its own for each call."
            )
        return calls.place, 0
