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


@dataclasses.dataclass
class _Calls:
    """How often an object drew; holding it keeps its id from being given again."""

    owner: Any
    place: int
    count: int = 0


class Microbatch:
    """The rows that one replica computes at once. Replica context.

    Attributes:
      seed: Of all that is drawn.
      training: Whether the pass is one of training or of evaluation, which draw apart.
      batch: int64 [], number of the global batch, counted over the whole run.
      first_row: int64 [], position of the first row in the global batch. The rows follow one
        another there.
      rows: How many they are; static.
      counts: bool [rows], False for padding and whatever else weighs 0; None if every row counts.
    """

    def __init__(
        self,
        *,
        seed: int,
        training: bool,
        batch: tf.Tensor,
        first_row: tf.Tensor,
        rows: int,
        counts: tf.Tensor | None = None,
    ):
        """Takes the attributes."""
        self.seed = seed
        self.training = training
        self.batch = batch
        self.first_row = first_row
        self.rows = rows
        self.counts = counts
        self._calls: dict[int, _Calls] = {}
        self._is_backward = False

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

    def call_number(self, owner: Any) -> tuple[int, int]:
        """Counts a layer's calls in this pass, to tell apart what they draw.

        Args:
          owner: The layer, or another object that draws.

        Returns:
          Its place in the order of first calls, which is the same on every replica and in every
          run of the same model; and how often it was called before in this pass.

        Raises:
          ConfigError: If a layer called more than once is recomputed for the backward pass
            (tf.recompute_grad): which of its calls is meant cannot be known.
        """
        calls = self._calls.setdefault(id(owner), _Calls(owner, place=len(self._calls)))
        if not self._is_backward:
            calls.count += 1
            return calls.place, calls.count - 1
        if calls.count != 1:
            raise ConfigError(
                f"the layer {getattr(owner, 'name', owner)!r} draws random numbers, is called "
                f"{calls.count} times and is recomputed for the backward pass (tf.recompute_grad). "
                "Use a layer of its own for each call."
            )
        return calls.place, 0
