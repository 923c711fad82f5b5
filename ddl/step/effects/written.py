"""The variables that a traced step or loss writes, and whether checkpoints hold them."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.framework import auto_control_deps_utils

from ddl.errors import ConfigError
from ddl.step.effects.tokens import Tokens
from ddl.tasks.parts import (
    attributes_of,
    copies_of,
    layers_of,
    models_of,
    own_items_of,
    own_variables_of,
    variables_of,
)
from ddl.tasks.task import Task

_HOLDERS = (
    *(keras.layers.Layer, keras.metrics.Metric, keras.random.SeedGenerator),
    *(tf.Module, tf.random.Generator),
)


def written_in(graph: tf.Graph, variables: Sequence[tf.Variable]) -> list[tf.Variable]:
    """Returns which of the variables a graph writes, also within its functions.

    Args:
      graph: The graph of a traced function, a FuncGraph.
      variables: The variables.
    """
    written = set(map(id, _written_handles(graph)))
    return [v for v in variables if any(id(copy.handle) in written for copy in copies_of(v))]


def moved_in(graph: tf.Graph, task: Task) -> list[str]:
    """Returns names of variables that a loss writes in training, once for each microbatch.

    Moments of BatchNormalization, states of random generators and metrics are left out.

    Args:
      graph: The graph of a trace of the loss, a FuncGraph.
      task: The task.
    """
    layers = layers_of(task)
    moving = [x for x in layers if not isinstance(x, keras.layers.BatchNormalization)]
    of_layers = [
        v.value for x in moving for v in [*x._non_trainable_variables, *x._trainable_variables]
    ]
    counted = (keras.metrics.Metric, keras.random.SeedGenerator, tf.random.Generator)
    others = [item for item in own_items_of(task) if isinstance(item, counted)]
    ids = {id(v) for v in variables_of(others)}
    own = own_variables_of(task, layers)
    own = [v for v in own if not any(id(copy) in ids for copy in copies_of(v))]
    names = [repr(v.name.split(":")[0]) for v in written_in(graph, [*of_layers, *own])]
    return list(dict.fromkeys(names))


def check_step_writes(name: str, graph: tf.Graph, known: Iterable[tf.Variable]) -> None:
    """Checks that a step assigns only to variables that checkpoints hold.

    Args:
      name: Name of the task.
      graph: The graph of the planning trace, a FuncGraph.
      known: The variables of the task, its layers and optimizers.

    Raises:
      ConfigError: If it assigns to another variable.
    """
    for handle in _others(_written_handles(graph), known):
        raise ConfigError(
            f"{name}.step assigns to a variable {_text(handle, graph)}, to which no attribute of "
            f"{name} leads, so no checkpoint would hold it and no skipped update would restore "
            "it. Keep the variable in an attribute of the task, in a list or dict there, or in a "
            "tf.Module."
        )


def check_loss_writes(
    where: str,
    graph: tf.Graph,
    task: Task,
    optimizers: Collection[keras.optimizers.Optimizer],
) -> None:
    """Checks that a loss writes only variables that checkpoints hold, such as moving statistics.

    Args:
      where: Name of the loss.
      graph: The graph of a trace of the loss, a FuncGraph.
      task: The task.
      optimizers: The optimizers of the Trainer.

    Raises:
      ConfigError: If it writes another variable.
    """
    written = _written_handles(graph)
    if not written:
        return
    layers = layers_of(task)
    known = [v.value for layer in layers for v in layer.variables]
    known += [*variables_of(layers), *own_variables_of(task, layers)]
    known += [v.value for optimizer in optimizers for v in optimizer.variables]
    others = _others(written, known)
    # The slower search, which follows every path that a checkpoint follows.
    for handle in _others(others, _reached_from(task)) if others else ():
        name = type(task).__name__
        raise ConfigError(
            f"{where} assigns to a variable {_text(handle, graph)}, to which no attribute of "
            f"{name} leads, so no checkpoint would hold it. Keep the layer, the generator or the "
            "variable in an attribute of the task. To count or to collect values, assign in a "
            "method step(update, batch), which runs once for all replicas and microbatches."
        )


def _reached_from(task: Task) -> Iterator[tf.Variable]:
    """Returns the variables that attributes of a task lead to, by all paths of a checkpoint.

    Such as a layer in a `tf.Module`, or an object that TensorFlow tracks in a model.
    """
    waiting: list[Any] = [task]
    for model in models_of(task).values():
        waiting += tf.train.TrackableView(model).descendants()
    seen: dict[int, Any] = {}
    while waiting:
        item = waiting.pop()
        if id(item) in seen:
            continue
        seen[id(item)] = item
        if isinstance(item, keras.Variable | tf.Variable):
            yield item.value if isinstance(item, keras.Variable) else item
        elif isinstance(item, Mapping):
            waiting += item.values()
        elif isinstance(item, list | tuple | set | frozenset):
            waiting += item
        elif item is task or isinstance(item, _HOLDERS) or hasattr(item, "per_example"):
            waiting += attributes_of(item).values()


def _others(handles: Iterable[tf.Tensor], known: Iterable[tf.Variable]) -> list[tf.Tensor]:
    """Returns the handles of variables, but for those of known ones."""
    ids = {id(copy.handle) for v in known for copy in copies_of(v)}
    forms = [(handle, getattr(handle, "_handle_data", None)) for handle in handles]
    return [  # tables and writers have no form
        handle
        for handle, form in forms
        if id(handle) not in ids and form is not None and form.is_set
    ]


def _text(handle: tf.Tensor, graph: tf.Graph) -> str:
    """Returns name, dtype and shape of a variable that a graph writes."""
    form = handle._handle_data.shape_and_type[0]
    shape, dtype = tuple(tf.TensorShape(form.shape)), tf.as_dtype(form.dtype).name
    names = [v.name for v in graph.variables if v.handle is handle]
    return f"{repr(names[0]) if names else 'without a known name'}, {dtype} {shape}"


def _written_handles(graph: tf.Graph) -> list[tf.Tensor]:
    """Returns the handles of the resources outside of a graph that it writes."""
    # Private to TensorFlow; test_a_skipped_update_restores_what_the_step_assigns fails without it.
    read_only = set(auto_control_deps_utils.get_read_only_resource_input_indices_graph(graph))
    outer = {id(inner): handle for handle, inner in graph.captures}
    tokens = Tokens(graph)
    return [
        outer[id(given)]
        for place, given in enumerate(graph.inputs)
        if given.dtype == tf.resource
        and place not in read_only
        and id(given) in outer
        and not tokens.include(given)
    ]
