"""Rematerialization: layers that the backward pass computes again.

A layer keeps only its inputs from the forward to the backward pass, which takes less memory and
more time. Results do not change: draws by position repeat. Chen et al. 2016, "Training Deep Nets
with Sublinear Memory Cost".
"""

import copy
import fnmatch
import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.backend.common.masking import get_keras_mask, set_keras_mask
from tensorflow.compiler.tf2xla.ops.gen_xla_ops import xla_optimization_barrier

from ddl import microbatch
from ddl.distribution.traits import traits_of
from ddl.errors import ConfigError, did_you_mean
from ddl.tasks.parts import layers_of, models_of
from ddl.tasks.task import Task

_OF_CALLS = ("current_call_ctx", "autocast_scope")
"""Names of the state of a thread that Keras's layers read from the calls around them."""


def recomputed(
    patterns: str | Sequence[str], task: Task, strategy: tf.distribute.Strategy
) -> Mapping[int, str]:
    """Prepares the layers of a task that patterns select; returns their names by their ids.

    A layer is computed again where the current microbatch (`Microbatch.remat`) names it.

    Args:
      patterns: Patterns of names of layers, such as "block_*". A layer within a layer that matches
        belongs to the outer one. Embeddings are never computed again: a lookup keeps nothing.
      task: The task, with built models.
      strategy: The strategy.

    Raises:
      ConfigError: If a pattern matches no layer, a layer holds BatchNormalization, whose moments
        the second computation would move again, or the strategy is asynchronous.
    """
    if traits_of(strategy).asynchronous:
        raise ConfigError(
            "Trainer.remat needs weights that do not change during an update, got "
            f"{type(strategy).__name__}. Leave it out, or choose --strategy=multi_worker_mirrored."
        )
    models = list(models_of(task).values())
    layers = [
        x for x in layers_of(task) if x not in models and not isinstance(x, keras.layers.Embedding)
    ]
    matching: list[keras.layers.Layer] = []
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        found = [x for x in layers if fnmatch.fnmatchcase(x.name, pattern)]
        if not found:
            names = [layer.name for layer in layers]
            raise ConfigError(
                f"Trainer.remat must match layers of the task, but {pattern!r} matches none of "
                f"{', '.join(names):.900}.{did_you_mean(pattern, names)}"
            )
        matching += found
    for layer in matching:
        if any(isinstance(x, keras.layers.BatchNormalization) for x in layer._flatten_layers()):
            raise ConfigError(
                f"Trainer.remat matches {layer.name!r}, which holds BatchNormalization: the "
                "second computation would take its moments again. Match layers without it."
            )
        if getattr(layer.call, "func", None) is not _call:
            layer.call = functools.partial(_call, layer, layer.call)
    return {id(layer): layer.name for layer in matching}


def _call(layer: keras.layers.Layer, function: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls a layer; its gradient computes it again where the current microbatch says so."""
    current = microbatch.current()
    if current is None or id(layer) not in (current.remat or ()) or tf.executing_eagerly():
        return function(*args, **kwargs)
    leaves = keras.tree.flatten((args, kwargs))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, tf.Tensor)]
    at_call = current.copied()
    calls = {name: copy.copy(global_state.get_global_attribute(name)) for name in _OF_CALLS}
    structure: list[Any] = []

    def compute(given: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        replaced = list(leaves)
        for place, value in zip(places, given, strict=True):
            set_keras_mask(value, get_keras_mask(leaves[place]))
            replaced[place] = value
        own_args, own_kwargs = keras.tree.pack_sequence_as((args, kwargs), replaced)
        with _Unchanged(collect_losses=True, initialize_variables=False):
            structure[:] = [function(*own_args, **own_kwargs)]
        return list(keras.tree.flatten(structure[0]))

    @tf.custom_gradient
    def part(*tensors: tf.Tensor) -> tuple[Any, Any]:
        def gradient(*upstream: tf.Tensor, variables: Sequence[tf.Variable] = ()) -> Any:
            *again, counter = _after(upstream, [*tensors, at_call.counter])
            with tf.GradientTape() as tape:
                tape.watch(again)
                with _in_calls(calls), at_call.repeated(counter).forward():
                    second = compute(again)
            given = tape.gradient(second, [*again, *variables], output_gradients=list(upstream))
            return given[: len(again)], given[len(again) :]

        return tuple(compute(tensors)), gradient

    results = keras.tree.flatten(part(*(leaves[place] for place in places)))
    for value, first in zip(results, keras.tree.flatten(structure[0]), strict=True):
        set_keras_mask(value, get_keras_mask(first))
    return keras.tree.pack_sequence_as(structure[0], results)


class _Unchanged(keras.StatelessScope):
    """Refuses changes of variables, and losses of layers, within the `with` block."""

    def add_update(self, update: tuple[keras.Variable, tf.Tensor]) -> None:
        self._refuse(f"changes its variable {update[0].path}")

    def add_loss(self, loss: tf.Tensor) -> None:
        self._refuse("adds a loss (add_loss, or an activity regularizer)")

    def _refuse(self, what: str) -> None:
        raise ConfigError(
            f"A layer {what} in the forward pass, so the backward pass must not compute it again. "
            "Leave the layer out of Trainer.remat."
        )


@contextmanager
def _in_calls(state: dict[str, Any]) -> Iterator[None]:
    """Makes Keras's layers read that state within the `with` block."""
    earlier = {name: global_state.get_global_attribute(name) for name in state}
    for name, value in state.items():
        global_state.set_global_attribute(name, copy.copy(value))  # a layer writes to it
    try:
        yield
    finally:
        for name, value in earlier.items():
            global_state.set_global_attribute(name, value)


def _after(upstream: Sequence[tf.Tensor], tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns tensors that exist only once the gradients of the outputs do.

    Otherwise TensorFlow would compute the layer again at once, or merge both computations.
    """
    if microbatch.is_compiled():  # XLA has no control dependencies
        return list(xla_optimization_barrier([*tensors, *upstream])[: len(tensors)])
    with tf.control_dependencies(upstream):
        return [tf.identity(tensor) for tensor in tensors]
