"""Draws by Python's `random` and by `numpy.random` while a loss or a step is traced.

A trace draws them once, and its graph holds the numbers for all updates. Each replica and each
resumed run traces anew and draws others.
"""

import functools
import hashlib
import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ddl.errors import ConfigError
from ddl.step.effects.stateful import with_called
from ddl.tasks.parts import layers_of, own_items_of

_KINDS = (random.Random, np.random.Generator, np.random.RandomState)

_MOST_TRACES = 6
"""Two draws may be equal, such as two choices among a few operations."""


class Generators:
    """The global generators of Python and NumPy, and those that a task or its layers keep."""

    def __init__(self, task: Any):
        """Finds the generators of a task that is built."""
        of_layers = (item for layer in layers_of(task) for item in vars(layer).values())
        self._own = [
            item
            for item in (*own_items_of(task), *of_layers)
            if isinstance(item, _KINDS) and not isinstance(item, random.SystemRandom)
        ]

    def states(self) -> bytes:
        """Returns the states, for a comparison."""
        return pickle.dumps([random.getstate(), np.random.get_state(), *self._own])


def check_python_draws(where: str, task: Any, trace: Callable[[], tf.Graph]) -> None:
    """Raises ConfigError if the graph of a trace depends on the generators of Python or NumPy.

    Call it after a trace that has moved their states, which happens for other reasons, too: another
    thread draws, or Keras seeds new layers. The graph depends on them if it differs between traces.

    Args:
      where: Name of the function, for the error.
      task: The task.
      trace: Traces the function anew.
    """
    generators = Generators(task)
    digests: set[bytes] = set()
    layers: list[str] = []
    for _ in range(_MOST_TRACES):
        before = generators.states()
        with _drawing_layers(generators, layers):
            graph = trace()
        if generators.states() == before:
            return
        digests.add(_digest(graph))
        if len(digests) > 1:
            of = f" in the layer {', '.join(dict.fromkeys(layers))}" if layers else ""
            raise ConfigError(
                f"{where} draws numbers by Python's random module or by numpy.random{of}. A trace "
                "draws them once, for all updates, and each replica and each resumed run draws "
                "others. Draw with keras.random or ddl.random, or in the data (dataset.map), where "
                "Keras's AugMix belongs. Draw constants in a constructor, with a fixed seed."
            )


@contextmanager
def _drawing_layers(generators: Generators, found: list[str]) -> Iterator[None]:
    """Adds the innermost layers that are called within the `with` block and move a state."""
    call = keras.layers.Layer.__call__

    @functools.wraps(call)
    def noted(layer: keras.layers.Layer, *args: Any, **kwargs: Any) -> Any:
        before, number = generators.states(), len(found)
        outputs = call(layer, *args, **kwargs)
        if len(found) == number and generators.states() != before:
            found.append(f"{type(layer).__name__} {layer.name!r}")
        return outputs

    keras.layers.Layer.__call__ = noted
    try:
        yield
    finally:
        keras.layers.Layer.__call__ = call


def _digest(graph: tf.Graph) -> bytes:
    """Returns a digest of the kinds of a graph's operations and of its constants."""
    digest = hashlib.sha256()
    seen: set[str] = set()
    for operation in graph.get_operations():
        for node in with_called(graph, operation.node_def, seen):
            digest.update(f"{node.op}\0".encode())
            if node.op == "Const":
                digest.update(node.attr["value"].SerializeToString(deterministic=True))
    return digest.digest()
