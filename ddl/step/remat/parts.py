"""The parts of a task's models that the backward pass computes again."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from ddl import microbatch
from ddl.distribution.traits import traits_of
from ddl.errors import ConfigError, did_you_mean
from ddl.layers import PartitionedEmbedding
from ddl.step.remat.again import computed_again
from ddl.step.remat.graphs import (
    Chain,
    Section,
    functional_of,
    is_traced,
    nodes_of,
    numbers_of_blocks,
)
from ddl.step.remat.graphs import patch as patch_functional
from ddl.step.remat.rule import Remat
from ddl.tasks.parts import layers_of, models_of
from ddl.tasks.task import Task

_MOST_NAMES = 60
_TABLES = (keras.layers.Embedding, PartitionedEmbedding)


class _Part(NamedTuple):
    """A part before its neighbours join it.

    Attributes:
      model: The functional model whose calls make up the part; None for a layer.
      places: Places of the calls in the model's order.
      layer: The layer, if there is no model.
      name: Path of the first layer.
    """

    model: Any
    places: range
    layer: Any
    name: str


class Parts:
    """The parts of a task's models that the backward pass computes again.

    Attributes:
      names: Names of the parts, in the order of the models' layers.
      chains: The chain of each functional model with parts, by its id.
      layers: Names of the layers that are parts, by their ids.
    """

    def __init__(self, rule: Remat, task: Task, strategy: tf.distribute.Strategy):
        """Selects the parts, and prepares the layers, which stay as they are in other trainers.

        Args:
          rule: Selects them.
          task: The task, with built models.
          strategy: The strategy.

        Raises:
          ConfigError: If a pattern matches no layer, if parts to join are not in a functional or
            sequential model, or if the strategy is asynchronous.
        """
        if traits_of(strategy).asynchronous:
            raise ConfigError(
                "Trainer.remat needs weights that do not change during an update, got "
                f"{type(strategy).__name__}, where other workers change them. Leave Trainer.remat "
                "out, or choose another --strategy, such as multi_worker_mirrored."
            )
        self._rule = rule
        self._task = task
        self._paths: list[str] = []
        self._matched: set[int] = set()
        self._seen: set[int] = set()
        found = [part for root, path in _roots(task) for part in self._of(root, path, True)]
        self._check_patterns()
        chosen = self._joined(found)[:: rule.every]
        self.names = [_name(parts) for parts in chosen]
        self.layers = {id(p.layer): p.name for (p, *_) in chosen if p.layer is not None}
        for part, *_ in chosen:
            if part.layer is not None:
                _patch(part.layer)
        models = {id(part.model): part.model for (part, *_) in chosen if part.model is not None}
        self.chains = {key: self._chain(model, chosen) for key, model in models.items()}
        self._kept = [*models.values(), *(p.layer for (p, *_) in chosen)]  # ids stay theirs
        for model in models.values():
            patch_functional(model)

    def variables(self) -> list[keras.Variable]:
        """Returns all variables of the task's layers, also states of their random generators."""
        return [
            variable
            for layer in layers_of(self._task)
            for variable in (
                *layer._trainable_variables,
                *layer._non_trainable_variables,
                *(generator.state for generator in layer._seed_generators),
            )
        ]

    def _of(self, layer: Any, path: str, is_container: bool) -> Iterator[_Part]:
        """Yields the parts of a layer, with its path; those within, if it is a container."""
        if isinstance(layer, _TABLES):
            return  # a lookup keeps nothing; computed again, it would read the whole table
        if id(layer) in self._seen:
            return
        self._seen.add(id(layer))
        if not is_container and self._match(path):
            for inner, name in _inner(layer, path):  # a pattern may match only within
                self._note(inner, name)
            yield _Part(None, range(0), layer, path)
            return
        model = functional_of(layer)
        if model is None:
            for inner, name in _inner(layer, path):
                yield from self._of(inner, name, False)
        else:
            yield from self._of_functional(model, path)

    def _of_functional(self, model: Any, path: str) -> Iterator[_Part]:
        nodes = nodes_of(model)
        blocks = numbers_of_blocks(model, nodes)
        key, first = None, 0

        def name(place: int) -> str:
            return _joined_path(path, nodes[place].operation.name)

        for place, node in enumerate(nodes):
            operation = node.operation
            excluded = isinstance(operation, _TABLES)
            matching = [] if excluded else self._match(name(place))
            own = (blocks[place], matching[0]) if matching else None
            if key is not None and own != key:
                yield _Part(model, range(first, place), None, name(first))
            if own != key:
                key, first = own, place
            if matching:
                for inner, inner_path in _inner(operation, name(place)):
                    self._note(inner, inner_path)
            elif not excluded and isinstance(operation, keras.layers.Layer):
                yield from self._of(operation, name(place), True)
        if key is not None:
            yield _Part(model, range(first, len(nodes)), None, name(first))

    def _match(self, path: str) -> list[int]:
        """Returns the numbers of the patterns that match a path, and keeps note of both."""
        numbers = self._rule.matching(path)
        self._paths.append(path)
        self._matched.update(numbers)
        return numbers

    def _note(self, layer: Any, path: str) -> None:
        self._match(path)
        for inner, name in _inner(layer, path):
            self._note(inner, name)

    def _check_patterns(self) -> None:
        for number, pattern in enumerate(self._rule.patterns):
            if number in self._matched:
                continue
            paths = list(dict.fromkeys(self._paths))
            listed = ", ".join(paths[:_MOST_NAMES]) or "(none)"
            more = f" and {len(paths) - _MOST_NAMES} more" if len(paths) > _MOST_NAMES else ""
            raise ConfigError(
                f"Remat.layers must match layers of the task, but {pattern!r} matches none."
                f"{did_you_mean(pattern, paths)} The layers, without embeddings, which are never "
                f"recomputed: {listed}{more}."
            )

    def _joined(self, found: list[_Part]) -> list[list[_Part]]:
        """Joins as many neighbours in a model as the rule says."""
        joined: list[list[_Part]] = []
        for part in found:
            if self._rule.together > 1 and part.model is None:
                raise ConfigError(
                    f"Remat.together must be 1 for {part.name!r}, which the code of a model or a "
                    f"task calls, got {self._rule.together}: such calls cannot be joined. Set "
                    "Remat.together = 1, or put the layers to join into a keras.Sequential or a "
                    "functional model."
                )
            last = joined[-1] if joined else []
            if (
                last
                and len(last) < self._rule.together
                and last[-1].model is part.model
                and last[-1].places.stop == part.places.start
            ):
                last.append(part)
            else:
                joined.append([part])
        return joined

    def _chain(self, model: Any, chosen: Sequence[list[_Part]]) -> Chain:
        """Returns the chain of a model: its parts, and what lies between them."""
        nodes, sections, end = nodes_of(model), [], 0
        for parts in chosen:
            if parts[0].model is not model:
                continue
            first, stop = parts[0].places.start, parts[-1].places.stop
            sections += [Section(nodes[end:first]), Section(nodes[first:stop], _name(parts))]
            end = stop
        return Chain(model, [s for s in (*sections, Section(nodes[end:])) if s.nodes])


def _roots(task: Task) -> Iterator[tuple[Any, str]]:
    """Yields the outermost models of a task as "", and its other layers, with their paths."""
    models = models_of(task)
    inner = {id(x) for m in models.values() for x in m._flatten_layers(include_self=False)}
    roots = {id(m): (m, "" if len(models) == 1 else name) for name, m in models.items()}
    layers = layers_of(task)
    inner |= {id(x) for layer in layers for x in layer._flatten_layers(include_self=False)}
    for layer in layers:
        if id(layer) not in inner and id(layer) not in roots:
            roots[id(layer)] = (_Holder([layer]), "")
    yield from (root for key, root in roots.items() if key not in inner)


class _Holder:
    """Layers that a task holds itself, as if they were those of a model."""

    def __init__(self, layers: Sequence[keras.layers.Layer]):
        self.layers = layers

    def _flatten_layers(self, include_self: bool, recursive: bool) -> Sequence[Any]:
        return self.layers


def _inner(layer: Any, path: str) -> list[tuple[Any, str]]:
    """Returns the layers directly within a layer, with their paths."""
    if not hasattr(layer, "_flatten_layers"):
        return []  # an operation of keras.ops
    inner = layer._flatten_layers(include_self=False, recursive=False)
    return [
        (one, _joined_path(path, one.name))
        for one in inner
        if not isinstance(one, keras.layers.InputLayer)
    ]


def _joined_path(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name


def _name(parts: Sequence[_Part]) -> str:
    """Returns the name of joined parts: that of the first, and of the last layer if another."""
    first, last = parts[0], parts[-1]
    if first.model is None:
        return first.name
    end = nodes_of(first.model)[last.places.stop - 1].operation.name
    return first.name if first.name.rpartition("/")[2] == end else f"{first.name} … {end}"


def _patch(layer: keras.layers.Layer) -> None:
    """Makes a layer's call be computed again where the current microbatch says so."""
    own = vars(layer).get("call")
    if not (isinstance(own, functools.partial) and own.func is _call):
        layer.call = functools.partial(_call, layer, own)


def _call(layer: keras.layers.Layer, own: Any, *args: Any, **kwargs: Any) -> Any:
    function = own or functools.partial(type(layer).call, layer)
    current = microbatch.current()
    parts = None if current is None else current.remat
    name = None if parts is None else parts.layers.get(id(layer))
    if parts is None or name is None or not is_traced(keras.tree.flatten((args, kwargs))):
        return function(*args, **kwargs)
    return computed_again(
        name,
        lambda given: function(*given[0], **given[1]),
        (args, kwargs),
        layer.variables,
        parts.variables,
    )
