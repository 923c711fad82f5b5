"""Random numbers that a step draws itself, outside of its losses."""

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeVar

import tensorflow as tf

from ddl import microbatch
from ddl.microbatch import Microbatch

_Result = TypeVar("_Result")

_OF_STEP = -1
"""Number in the place of a pass's for what the step itself draws; passes count from 0."""


class StepDraws:
    """The source of a step's random numbers, the same on all replicas and in a resumed run.

    A draw of a step belongs to no row, so all replicas share it.
    """

    def __init__(self, seed: int, counter: tf.Tensor):
        """Keeps the arguments.

        Args:
          seed: Seed of the trainer.
          counter: `ddl.random.batch_counter` of the global batch.
        """
        self._first = Microbatch(
            seed=seed,
            training=True,
            counter=counter,
            first_row=0,
            rows=0,
            draws=_OF_STEP,
        )

    def forward(self) -> AbstractContextManager[None]:
        """Makes this source that of the thread within the `with` block."""
        return self._first.forward()

    def in_branch(self) -> Microbatch:
        """Returns the source for a branch, in the branch's graph.

        It continues to count the draws, so that no two draws of a step are the same.
        """
        return dataclasses.replace(self._first)


def same_on_replicas(
    strategy: tf.distribute.Strategy, function: Callable[..., _Result], args: tuple
) -> _Result:
    """Runs a function on each replica, where it draws what the step would draw here.

    Cross-replica context.
    """
    current = microbatch.current()
    if current is None:
        return strategy.run(function, args=args)
    copies = []

    def drawing(*own: object) -> _Result:
        copy = current.copied()
        copies.append(copy)
        with copy.forward():
            return function(*own)

    result = strategy.run(drawing, args=args)
    current.advance_to(copies[0])
    return result
