"""A function's draws at all rows of a global batch, and at a third of them three times."""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from ddl import random
from tests.conftest import microbatch

ROWS, PART = 12, 4

Call = Callable[[tf.Tensor, int], Any]
"""Takes the first row, int64 [], and the number of rows; returns tensors [rows, …]."""


def _traced(call: Call, rows: int, jit_compile: bool = False, **pass_of: Any) -> Callable[..., Any]:
    """Returns a function of the first row that calls another in a pass."""

    @tf.function(autograph=False, jit_compile=jit_compile)
    def run(first: tf.Tensor) -> Any:
        current = microbatch(first_row=first, rows=rows)
        for name, value in pass_of.items():
            setattr(current, name, value)
        with current.forward():
            return call(first, rows)

    return run


def placing(call: Call) -> dict[Any, int]:
    """Returns where the draws of a function lie, as the probes of a loss find it."""
    found: list[dict[Any, Any]] = [{}, {}]
    for rows, drawn in zip(random.PROBED, found, strict=True):
        _traced(call, rows, drawn=drawn).get_concrete_function(tf.TensorSpec([], tf.int64))
    return random.placing(*found, *random.PROBED)


def whole_and_parts(call: Call, **pass_of: Any) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Returns what a function gives for all rows at once, and for each third of them.

    Args:
      call: The function.
      **pass_of: `jit_compile`, and attributes of the microbatch.
    """
    pass_of = {"placing": placing(call), **pass_of}

    def at(rows: int) -> list[np.ndarray]:
        run = _traced(call, rows, **pass_of)
        found = [run(tf.constant(first, tf.int64)) for first in range(0, ROWS, rows)]
        each = zip(*map(tf.nest.flatten, found), strict=True)
        return [np.concatenate([np.asarray(part, "f8") for part in parts]) for parts in each]

    return at(ROWS), at(PART)
