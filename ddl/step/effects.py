"""Effects of a traced loss or step besides its results: draws, stateful operations, writes."""

import pickle
import random
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.framework import auto_control_deps_utils, op_def_registry

from ddl.errors import ConfigError
from ddl.random import nodes_of
from ddl.tasks.parts import copies_of, layers_of, own_items_of, own_variables_of, variables_of
from ddl.tasks.task import Task

# Operations that TensorFlow counts as stateful and that do no harm: they work on variables and
# tables, which a checkpoint holds or the data give, send tensors between replicas, or only output.
# What calls functions is as harmless as the functions.
_ALLOWED = re.compile(
    r"^(ReadVariableOp|Assign\w*|Resource\w+|Var\w*|Variable\w*|(Destroy)?TemporaryVariable|"
    r"DestroyResourceOp|\w*Iterator\w*|\w*HashTable\w*|LookupTable(Find|Size|Export)\w*|"
    r"Assert|CheckNumerics(V2)?|Print(V2)?|\w*PyFunc\w*|\w*Summary\w*|Placeholder|TensorArray\w*|"
    r"Empty|"  # of zeros, which tf.nn.ctc_loss fills
    r"PartitionedCall|StatefulPartitionedCall|While|If|Case|StatelessRandomGetAlg|"
    r"Collective\w+|Nccl\w+|OutfeedEnqueue\w*|Xla\w+)$"
)
# By which tf.random draws from a seed, for the rows of a replica alone; `ddl.random` has own keys.
_OF_SEED = "StatelessRandomGetKeyCounter"
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState)
_MOST_TRACES = 6
"""Two draws may be equal, such as two choices among a few operations."""


def check_stateless(where: str, graph: tf.Graph) -> None:
    """Raises ConfigError for an operation that draws by a seed, or counts by a state of its own.

    The list of allowed operations is short, so that an unknown stateful one is refused.

    Args:
      where: Name of the loss or step.
      graph: Graph of its trace; the functions that it calls are searched too.
    """
    for node in nodes_of(graph.as_graph_def()):
        definition = op_def_registry.get(node.op)
        draws = node.op == _OF_SEED or (definition is not None and definition.is_stateful)
        if not draws or _ALLOWED.match(node.op):
            continue
        # The recurrent kernels of GPUs have seeds for a dropout that Keras does not use.
        if "dropout" in node.attr and not node.attr["dropout"].f:
            continue
        raise ConfigError(
            f"{where} runs the operation {node.op} at {node.name!r}, which draws or counts by "
            "itself: values may depend on the number of replicas, and a resumed run may not repeat "
            "them. Draw with keras.random or ddl.random instead of tf.random, or in the data "
            "(decode), constants with NumPy, and keep counts in a tf.Variable."
        )


def states_of_generators(task: Any) -> bytes:
    """Returns the states of the generators of Python and NumPy, and of a task and its layers."""
    of_layers = (item for layer in layers_of(task) for item in vars(layer).values())
    items = [item for item in (*own_items_of(task), *of_layers) if isinstance(item, _GENERATORS)]
    generators = [item for item in items if not isinstance(item, random.SystemRandom)]
    return pickle.dumps([random.getstate(), np.random.get_state(), *generators])


def check_python_draws(where: str, task: Any, trace: Callable[[], tf.Graph]) -> None:
    """Raises ConfigError if the graph of a trace depends on the generators of Python or NumPy.

    Call it after a trace that has moved their states, which happens for other reasons, too: another
    thread draws, or Keras seeds new layers. The graph depends on them if it differs between traces.

    Args:
      where: Name of the function, for the error.
      task: The task.
      trace: Traces the function anew.
    """
    first = None
    for _ in range(_MOST_TRACES):
        before = states_of_generators(task)
        operations = [
            (node.op, node.attr["value"].SerializeToString(deterministic=True))
            for node in nodes_of(trace().as_graph_def())
        ]
        if states_of_generators(task) == before:
            return
        first = first or operations
        if operations != first:
            raise ConfigError(
                f"{where} draws numbers by Python's random module or by numpy.random. A trace "
                "draws them once, for all updates, and each replica and each resumed run draws "
                "others. Draw with keras.random or ddl.random, or in the data (dataset.map), where "
                "Keras's AugMix belongs. Draw constants in a constructor, with a fixed seed."
            )


def written_in(graph: tf.Graph, variables: Sequence[tf.Variable]) -> list[tf.Variable]:
    """Returns which of the variables a graph writes, also within its functions.

    Args:
      graph: The graph of a traced function, a FuncGraph.
      variables: The variables.
    """
    written = set(map(id, _written_handles(graph)))
    return [v for v in variables if any(id(copy.handle) in written for copy in copies_of(v))]


def names_written_in(graph: tf.Graph, task: Task) -> list[str]:
    """Returns names of variables that a loss writes in training, once for each microbatch.

    Moments of BatchNormalization, states of random generators and metrics are left out.

    Args:
      graph: The graph of a trace of the loss, a FuncGraph.
      task: The task.
    """
    layers = layers_of(task)
    counted = (keras.metrics.Metric, keras.random.SeedGenerator, tf.random.Generator)
    others = variables_of(x for x in own_items_of(task) if isinstance(x, counted))
    ids = set(map(id, others))
    found = [v for v in own_variables_of(task, layers) if not ids & set(map(id, copies_of(v)))]
    for layer in layers:
        if not isinstance(layer, keras.layers.BatchNormalization):
            # Without the variables of what a layer has in turn, such as its random generator.
            direct = (*layer._non_trainable_variables, *layer._trainable_variables)
            found += [v.value for v in direct]
    names = [v.name.split(":")[0] for v in written_in(graph, found)]
    return [repr(name) for name in dict.fromkeys(names)]


def check_writes(
    where: str,
    graph: tf.Graph,
    task: Task,
    optimizers: Iterable[keras.optimizers.Optimizer],
    strategy: tf.distribute.Strategy,
) -> None:
    """Checks that a loss or step writes only variables that checkpoints hold.

    Args:
      where: Name of the loss or step.
      graph: The graph of its trace, a FuncGraph.
      task: The task.
      optimizers: The optimizers of the Trainer.
      strategy: The strategy.

    Raises:
      ConfigError: If it writes another variable.
    """
    layers = layers_of(task)
    known = [v.value for holder in (*layers, *optimizers) for v in holder.variables]
    known += [*variables_of(layers), *own_variables_of(task, layers), *_tokens(strategy)]
    ids = {id(copy.handle) for v in known for copy in copies_of(v)}
    for handle in _written_handles(graph):
        form = getattr(handle, "_handle_data", None)
        if id(handle) in ids or form is None or not form.is_set:  # tables and writers have no form
            continue
        names = [v.name for v in graph.variables if v.handle is handle]
        raise ConfigError(
            f"{where} assigns to the variable {names[0] if names else handle!r}, to which no "
            f"attribute of {type(task).__name__} leads, so no checkpoint would hold it, and no "
            "skipped update would restore it. Keep the layer, the generator or the variable in an "
            "attribute of the task. To count or to collect values, assign in a method "
            "step(update, batch), which runs once for all replicas and microbatches."
        )


def _tokens(strategy: tf.distribute.Strategy) -> list[tf.Variable]:
    """Returns the variables by which TensorFlow orders collectives, which never change."""
    # Private to TensorFlow; tests/step/test_effects.py fails without them.
    launchers: list[Any] = []
    for name in ("_cross_device_ops", "_host_cross_device_ops"):
        launchers += getattr(getattr(strategy.extended, name, None), "_launchers", [])
    return [one._ordering_token for one in launchers]


def _written_handles(graph: tf.Graph) -> list[tf.Tensor]:
    """Returns the handles of the resources outside of a graph that it writes."""
    # Private to TensorFlow; test_a_skipped_update_restores_what_the_step_assigns fails without it.
    read_only = set(auto_control_deps_utils.get_read_only_resource_input_indices_graph(graph))
    outer = {id(inner): handle for handle, inner in graph.captures}
    return [
        outer[id(given)]
        for place, given in enumerate(graph.inputs)
        if given.dtype == tf.resource and place not in read_only and id(given) in outer
    ]
