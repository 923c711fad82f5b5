"""Rematerialization: layers that the backward pass computes again.

A layer keeps only its inputs from the forward to the backward pass, which takes less memory and
more time. Results do not change: draws by position repeat. Chen et al. 2016, "Training Deep Nets
with Sublinear Memory Cost".
"""

import copy
import dataclasses
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

_MOST_NAMES = 60
_OF_CALLS = ("current_call_ctx", "autocast_scope")
"""Names of the state of a thread that Keras's layers read from the calls around them."""


@dataclasses.dataclass(frozen=True)
class Remat:
    """Selects the layers that the backward pass computes again.

    Attributes:
      layers: Patterns of names of layers, such as "block_*", of which one must match; with a slash,
        patterns of the end of a path, such as "encoder/block_*". A layer within a layer that
        matches belongs to the outer one. Embeddings are never computed again.

    Raises:
      ConfigError: If there is no pattern.
    """

    layers: str | Sequence[str]

    def __post_init__(self) -> None:
        if not self.patterns or not all(isinstance(one, str) and one for one in self.patterns):
            raise ConfigError(
                "Remat.layers must be a pattern of names of layers, or a list of patterns, got "
                f"{self.layers!r:.80}. Pass one, such as 'block_*'."
            )

    @property
    def patterns(self) -> tuple[str, ...]:
        """The patterns of `layers`."""
        return (self.layers,) if isinstance(self.layers, str) else tuple(self.layers)

    def matching(self, path: str) -> list[str]:
        """Returns the patterns that match a layer.

        Args:
          path: Names of the layer and of the layers around it, outermost first, with slashes.
        """
        name = path.rpartition("/")[2]
        return [
            pattern
            for pattern in self.patterns
            if fnmatch.fnmatchcase(name, pattern)
            or ("/" in pattern and fnmatch.fnmatchcase(f"/{path}", f"*/{pattern}"))
        ]


def recomputed(rule: Remat, task: Task, strategy: tf.distribute.Strategy) -> Mapping[int, str]:
    """Prepares the layers of a task that a rule selects; returns their names by their ids.

    A layer is computed again where the current microbatch (`Microbatch.remat`) names it.

    Args:
      rule: Selects the layers.
      task: The task, with built models.
      strategy: The strategy.

    Raises:
      ConfigError: If a pattern matches no layer, a layer holds BatchNormalization, whose moments
        the second computation would move again, or the strategy is asynchronous.
    """
    if traits_of(strategy).asynchronous:
        raise ConfigError(
            "Trainer.remat needs weights that do not change during an update, got "
            f"{type(strategy).__name__}, where other workers change them. Leave Trainer.remat "
            "out, or choose another --strategy, such as multi_worker_mirrored."
        )
    paths: list[str] = []
    chosen: dict[int, tuple[str, keras.layers.Layer]] = {}
    models = list(models_of(task).values())
    inner = {id(x) for model in models for x in model._flatten_layers(include_self=False)}
    others = [x for x in layers_of(task) if id(x) not in inner and not isinstance(x, keras.Model)]
    for root in (*models, *others):
        for path, layer in _walk(root, "", rule, paths, is_root=root in models):
            chosen[id(layer)] = path, layer
    for pattern in rule.patterns:
        if not any(pattern in rule.matching(path) for path in paths):
            names = list(dict.fromkeys(paths))
            more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
            raise ConfigError(
                f"Remat.layers must match layers of the task, but {pattern!r} matches none."
                f"{did_you_mean(pattern, names)} The layers, without embeddings, which are never "
                f"recomputed: {', '.join(names[:_MOST_NAMES]) or '(none)'}{more}."
            )
    for path, layer in chosen.values():
        if any(isinstance(x, keras.layers.BatchNormalization) for x in layer._flatten_layers()):
            raise ConfigError(
                f"Remat.layers matches {path!r}, which holds BatchNormalization: the second "
                "computation would take its moments again. Match layers without it."
            )
        own = vars(layer).get("call")
        if not (isinstance(own, functools.partial) and own.func is _call):
            layer.call = functools.partial(_call, layer, own)
    return {key: path for key, (path, _) in chosen.items()}


def _walk(
    layer: Any, path: str, rule: Remat, paths: list[str], *, is_root: bool
) -> Iterator[tuple[str, keras.layers.Layer]]:
    """Yields the outermost layers that match, with their paths; adds all paths to a list."""
    # A table is never computed again: a lookup keeps nothing.
    if isinstance(layer, keras.layers.Embedding | keras.layers.InputLayer):
        return
    if not is_root:
        path = f"{path}/{layer.name}" if path else layer.name
        paths.append(path)
        if rule.matching(path):
            yield path, layer
            return
    for one in layer._flatten_layers(include_self=False, recursive=False):
        yield from _walk(one, path, rule, paths, is_root=False)


def _call(layer: keras.layers.Layer, own: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls a layer; its gradient computes it again where the current microbatch says so."""
    function = own or functools.partial(type(layer).call, layer)
    current = microbatch.current()
    leaves = keras.tree.flatten((args, kwargs))
    symbolic = any(isinstance(x, keras.KerasTensor) for x in leaves)
    if current is None or not current.remat or tf.executing_eagerly() or symbolic:
        return function(*args, **kwargs)
    if id(layer) not in current.remat:
        return function(*args, **kwargs)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, tf.Tensor)]
    variables = [v for v in layer.variables if "float" in v.dtype]
    draws, calls = current.copied(), _state_of_calls()
    structure: list[Any] = []

    def compute(given: Sequence[tf.Tensor], values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        replaced = list(leaves)
        for place, value in zip(places, given, strict=True):
            set_keras_mask(value, get_keras_mask(leaves[place]))
            replaced[place] = value
        own_args, own_kwargs = keras.tree.pack_sequence_as((args, kwargs), replaced)
        with _Values(layer, list(zip(variables, values, strict=True))):
            outputs = function(*own_args, **own_kwargs)
        structure[:] = [outputs]
        return list(keras.tree.flatten(outputs))

    @tf.custom_gradient
    def part(*tensors: tf.Tensor) -> tuple[Any, Any]:
        results = compute(tensors[: len(places)], tensors[len(places) :])

        def gradient(*upstream: tf.Tensor) -> Any:
            *again, counter = _after(upstream, [*tensors, draws.counter])
            with tf.GradientTape() as tape:
                tape.watch(again)
                with _in_calls(calls), draws.repeated(counter).forward():
                    second = compute(again[: len(places)], again[len(places) :])
            return tape.gradient(second, again, output_gradients=list(upstream))

        return tuple(results), gradient

    results = part(
        *(leaves[place] for place in places), *(tf.convert_to_tensor(v.value) for v in variables)
    )
    results = list(results) if isinstance(results, list | tuple) else [results]
    for value, first in zip(results, keras.tree.flatten(structure[0]), strict=True):
        set_keras_mask(value, get_keras_mask(first))
    return keras.tree.pack_sequence_as(structure[0], results)


class _Values(keras.StatelessScope):
    """Gives variables of a layer values within the `with` block, and refuses changes of them."""

    def __init__(
        self, layer: keras.layers.Layer, values: Sequence[tuple[keras.Variable, tf.Tensor]]
    ):
        super().__init__(values, initialize_variables=False)
        self._layer = layer

    def add_update(self, update: tuple[keras.Variable, tf.Tensor]) -> None:
        raise ConfigError(
            f"{self._layer.name!r} changes its variable {update[0].path} in the forward pass, so "
            "the backward pass must not compute it again. Leave the layer out of Remat.layers."
        )


def _state_of_calls() -> dict[str, Any]:
    """Returns what the calls around this one tell a layer, such as whether it trains."""
    return {name: copy.copy(global_state.get_global_attribute(name)) for name in _OF_CALLS}


@contextmanager
def _in_calls(state: dict[str, Any]) -> Iterator[None]:
    """Makes Keras's layers read that state within the `with` block."""
    earlier = {name: global_state.get_global_attribute(name) for name in _OF_CALLS}
    for name in _OF_CALLS:  # a layer writes to the context of its call
        global_state.set_global_attribute(name, copy.copy(state[name]))
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
