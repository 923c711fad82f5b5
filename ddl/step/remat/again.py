"""The gradient of a function from a second computation of it in the backward pass.

`tf.recompute_grad` has four faults that this module avoids. It takes no keyword arguments in a
graph. It repeats the changes of variables that the function makes. It loses, without an error, the
gradients of tensors that the function reads and does not take as arguments. And the second
computation reads variables that the first may have changed.

In the second computation, variables of Keras have the values from before the first one, and their
changes are dropped. The forward pass itself stays as it is, so that losses that layers add, and
other tensors that leave the function by a side door, keep their gradients.
"""

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.backend.common.masking import get_keras_mask, set_keras_mask
from tensorflow.compiler.tf2xla.ops.gen_xla_ops import xla_optimization_barrier

from ddl import microbatch
from ddl.errors import ConfigError
from ddl.step.remat.reads import check_not_assigned, read_in, values_of
from ddl.step.remat.side_effects import check_changes_nothing

# What Keras's layers read from the calls around them; names of Keras's own state of a thread.
_OF_CALLS = ("current_call_ctx", "autocast_scope")


def computed_again(
    name: str,
    function: Callable[[Any], Any],
    arguments: Any,
    variables: Sequence[keras.Variable],
    of_task: Callable[[], Sequence[keras.Variable]] = tuple,
) -> Any:
    """Returns the result of a function, whose gradient computes the function again.

    In a graph, in the forward pass of a microbatch. Every gradient starts one computation.

    Args:
      name: Name of the part of the model, for errors and the graph.
      function: Takes the arguments. It may read tensors that are not among them.
      arguments: A structure of tensors and other values.
      variables: Variables of Keras that the function may read or change.
      of_task: Returns all variables of Keras in the task. Those that the function reads count as
        its own: a later layer may change them.

    Raises:
      ConfigError: If the second computation cannot repeat the first; while tracing the gradient.
    """
    current = microbatch.current()
    assert current is not None
    if current.in_loop:
        raise ConfigError(
            f"{name!r} is called within a loop (tf.while_loop, tf.map_fn, a recurrent layer), so "
            "it cannot be recomputed alone. Name the layer around the loop in Remat.layers."
        )
    leaves = _tensors_of(name, arguments)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, tf.Tensor)]
    given = [leaves[place] for place in places]
    variables = [v for v in {id(v): v for v in variables}.values() if v._value is not None]
    values = [tf.convert_to_tensor(v._value) for v in variables]
    draws, calls = current.copied(), _state_of_calls()
    graph = tf.compat.v1.get_default_graph()
    first = graph.num_operations()
    with tf.name_scope(_scope(name)) as scope, tf.GradientTape() as tape:
        outputs = function(arguments)
    last, read = graph.num_operations(), read_in(graph, first, scope)
    own = {id(v) for v in variables}
    of_others = values_of([v for v in of_task() if id(v) not in own], read)
    variables += [variable for variable, _ in of_others]
    values += [value for _, value in of_others]
    results = _tensors_of(name, outputs)
    floats = [place for place, leaf in enumerate(results) if _is_differentiable(leaf)]
    if not floats:
        return outputs

    # The sources of the gradient: arguments, weights, other variables, other tensors.
    watched = {id(v.handle): v for v in tape.watched_variables()}
    weights = [place for place, v in enumerate(variables) if id(v._value.handle) in watched]
    own = {id(variables[place]._value.handle) for place in weights}
    others = [v for handle, v in watched.items() if handle not in own]
    captured = _captured(graph, first, scope, [*given, *values])
    if captured and graph is not current._graph:
        # Its backward pass, in a graph of its own, would read other tensors than those found here.
        raise ConfigError(
            f"{name!r} must take all tensors as arguments to be recomputed where a tf.cond or a "
            f"tf.function calls it, but it reads {len(captured)} others. Pass them as arguments, "
            "or leave the layer out of Remat.layers."
        )
    sources = [
        *filter(_is_differentiable, given),
        *(values[place] for place in weights),
        *map(tf.convert_to_tensor, others),
        *captured,
    ]

    def gradient(*upstream: Any) -> list[Any]:
        check_not_assigned(name, graph, last, read, variables)
        upstream = tuple(map(tf.convert_to_tensor, upstream))
        *tensors, counter = _after(upstream, [*given, *values, current.counter])
        inputs, own_values = tensors[: len(given)], tensors[len(given) :]
        replaced = list(leaves)
        for place, value in zip(places, inputs, strict=True):
            set_keras_mask(value, get_keras_mask(leaves[place]))
            replaced[place] = value
        state = _Unchanged(list(zip(variables, own_values, strict=True)))
        now = tf.compat.v1.get_default_graph()
        begin = now.num_operations()
        with tf.name_scope(f"again_{_scope(name)}") as scope, tf.GradientTape() as tape:
            differentiated = [
                *filter(_is_differentiable, inputs),
                *(own_values[place] for place in weights),
            ]
            tape.watch([*differentiated, *captured])
            with _in_calls(calls), draws.repeated(counter).forward(), state:
                again = function(keras.tree.pack_sequence_as(arguments, replaced))
        check_changes_nothing(name, now, begin, scope)
        _check_weights_kept(name, state.changed, watched)
        seen = {id(v.handle): v for v in tape.watched_variables()}
        _check_same(name, results, _tensors_of(name, again), set(seen) - set(watched))
        targets = _tensors_of(name, again)
        found = tape.gradient(
            [targets[place] for place in floats],
            [*differentiated, *captured, *seen.values()],
            output_gradients=list(upstream),
        )
        # A weight may also be read past Keras.
        of_read = dict(zip(seen, found[len(differentiated) + len(captured) :], strict=True))
        of_weights = len(differentiated) - len(weights)
        for number, place in enumerate(weights, start=of_weights):
            of_read_too = of_read.get(id(variables[place]._value.handle))
            found[number] = _sum(found[number], of_read_too)
        of_captured = found[len(differentiated) :][: len(captured)]
        of_others = [of_read.get(id(v.handle)) for v in others]
        return [*found[: len(differentiated)], *of_others, *of_captured]

    @tf.custom_gradient
    def attached(*_: tf.Tensor) -> tuple[Any, Any]:
        # TensorFlow's search for variables ends at tf.stop_gradient.
        return tuple(tf.stop_gradient(results[place]) for place in floats), gradient

    for place, value in zip(floats, attached(*sources), strict=True):
        set_keras_mask(value, get_keras_mask(results[place]))
        results[place] = value
    return keras.tree.pack_sequence_as(outputs, results)


class _Unchanged(keras.StatelessScope):
    """Gives variables of Keras values, and keeps changes of them from the variables.

    A value that was assigned has no gradient, as where the variable itself is changed.
    """

    def __init__(self, state_mapping: Sequence[tuple[keras.Variable, tf.Tensor]]):
        super().__init__(state_mapping, initialize_variables=False)
        self.changed: list[keras.Variable] = []

    def add_update(self, update: tuple[keras.Variable, tf.Tensor]) -> None:
        variable, value = update
        self.changed.append(variable)
        super().add_update((variable, tf.stop_gradient(value)))


def _after(upstream: Sequence[tf.Tensor], tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns tensors that exist only once the gradients of the outputs do.

    Otherwise TensorFlow would compute the function again at once, or merge both computations.
    """
    if microbatch.is_compiled():  # XLA has no control dependencies
        return list(_barrier(*tensors, *upstream)[: len(tensors)])
    with tf.control_dependencies(upstream):
        return [tf.identity(tensor) for tensor in tensors]


@tf.custom_gradient
def _barrier(*tensors: tf.Tensor) -> tuple[Any, Any]:
    passed = xla_optimization_barrier([tf.stop_gradient(x) for x in tensors])
    return tuple(passed), lambda *upstream: upstream


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


def _captured(
    graph: tf.Graph, first: int, scope: str, known: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """Returns the differentiable tensors from outside that operations of a scope read.

    Args:
      graph: The graph.
      first: Number of operations before those of the scope.
      scope: Prefix of the names of the operations.
      known: Tensors to leave out.
    """
    named = {tensor.name for tensor in known}
    found: dict[str, tf.Tensor] = {}
    for operation in graph.get_operations()[first:]:
        if not operation.name.startswith(scope):  # of another replica
            continue
        for tensor in operation.inputs:
            source = tensor.op
            inside = source.name.startswith(scope) and source.type != "Placeholder"
            if not inside and _is_differentiable(tensor) and tensor.name not in named:
                found[tensor.name] = tensor
    return list(found.values())


def _tensors_of(name: str, structure: Any) -> list[Any]:
    """Returns the leaves of a structure.

    Raises:
      ConfigError: If there are ragged or sparse tensors among them.
    """
    leaves = list(keras.tree.flatten(structure))
    for leaf in leaves:
        if isinstance(leaf, tf.RaggedTensor | tf.SparseTensor | tf.IndexedSlices):
            raise ConfigError(
                f"{name!r} must take and return dense tensors to be recomputed, got a "
                f"{type(leaf).__name__}. Leave the layer out of Remat.layers."
            )
    return leaves


def _is_differentiable(value: Any) -> bool:
    return isinstance(value, tf.Tensor) and (value.dtype.is_floating or value.dtype.is_complex)


def _check_weights_kept(
    name: str, changed: Sequence[keras.Variable], watched: dict[int, Any]
) -> None:
    for variable in changed:
        if id(variable._value.handle) in watched:
            raise ConfigError(
                f"{name!r} assigns to its trainable weight {variable.path} in the forward pass, so "
                "the backward pass cannot compute it again. Leave the layer out of Remat.layers."
            )


def _check_same(name: str, first: list[Any], second: list[Any], further: set[int]) -> None:
    """Raises ConfigError if two computations differ in their outputs or variables."""

    def forms(leaves: list[Any]) -> list[Any]:
        return [(leaf.dtype, leaf.shape) for leaf in leaves if isinstance(leaf, tf.Tensor)]

    if forms(first) != forms(second) or len(first) != len(second) or further:
        raise ConfigError(
            f"{name!r} must compute the same when the backward pass computes it again, but it "
            "returned other tensors or read other variables. Leave it out of Remat.layers, or let "
            "its `call` depend on its arguments alone."
        )


def _sum(one: Any, other: Any) -> Any:
    if one is None or other is None:
        return other if one is None else one
    return tf.convert_to_tensor(one) + tf.convert_to_tensor(other)


def _scope(name: str) -> str:
    """Returns a name as TensorFlow takes it for a scope."""
    return "remat_" + re.sub(r"[^\w.-]", "_", name)
