"""Functional models as chains of parts, some of which the backward pass computes again."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras.src.models.functional import Functional

from ddl import microbatch
from ddl.step.remat.again import computed_again


class Section(NamedTuple):
    """Consecutive calls of a functional model.

    Attributes:
      nodes: Keras's nodes of the calls, in the order of the computation.
      name: Name of the part that they make up; "" if it is not computed again.
    """

    nodes: list[Any]
    name: str = ""


def functional_of(layer: Any) -> Functional | None:
    """Returns the functional model that computes a layer's call; None for other layers.

    The attributes of Keras that this module reads are private; tests/step/remat guards them.
    """
    inner = layer._functional if isinstance(layer, keras.Sequential) else layer
    if isinstance(layer, keras.Sequential) and type(layer).call is not keras.Sequential.call:
        return None
    is_plain = isinstance(inner, Functional) and type(inner).call is Functional.call
    return inner if is_plain else None


def nodes_of(model: Functional) -> list[Any]:
    """Returns the calls of a functional model, without inputs, in Keras's order."""
    depths = sorted(model._nodes_by_depth, reverse=True)
    return [n for depth in depths for n in model._nodes_by_depth[depth] if not n.is_input]


def numbers_of_blocks(model: Functional, nodes: Sequence[Any]) -> list[int]:
    """Returns for each call the number of its block.

    A block ends where at most one tensor passes on to later calls. Inputs of the model, and
    tensors without gradients, such as masks, do not count.
    """
    last_use: dict[int, float] = {}
    for place, node in enumerate(nodes):
        last_use |= {id(tensor): place for tensor in node.input_tensors}
    last_use |= {id(tensor): math.inf for tensor in model.outputs}
    numbers, number = [], 0
    alive: dict[int, float] = {}
    for place, node in enumerate(nodes):
        numbers.append(number)
        floats = (tensor for tensor in node.outputs if "float" in str(tensor.dtype))
        alive |= {id(tensor): last_use.get(id(tensor), -1) for tensor in floats}
        alive = {tensor: last for tensor, last in alive.items() if last > place}
        if len(alive) <= 1:
            number += 1
    return numbers


class Chain:
    """The sections of a functional model, in the order of the computation."""

    def __init__(self, model: Functional, sections: Sequence[Section]):
        """Finds what each part reads and returns."""
        self._sections = sections
        produced = [{id(x) for node in s.nodes for x in node.outputs} for s in sections]
        read = [{id(x): None for node in s.nodes for x in node.input_tensors} for s in sections]
        self._inputs = [
            [x for x in needed if x not in own] for needed, own in zip(read, produced, strict=True)
        ]
        later = {id(x) for x in model.outputs}
        self._outputs: list[list[int]] = []
        for own, needed in zip(reversed(produced), reversed(self._inputs), strict=True):
            self._outputs.insert(0, [x for x in own if x in later])
            later.update(needed)
        self._variables = [
            [
                variable
                for node in section.nodes
                if isinstance(node.operation, keras.layers.Layer)
                for variable in node.operation.variables
            ]
            for section in sections
        ]

    def run(
        self,
        values: dict[int, Any],
        prepared: Callable[[Any], Any],
        of_task: Callable[[], Sequence[keras.Variable]],
    ) -> None:
        """Adds the results of all calls to the values.

        Args:
          values: Tensors by the ids of Keras's symbolic ones: at first the model's inputs.
          prepared: Makes an operation ready to be called.
          of_task: Returns all variables of the task.
        """
        for place, section in enumerate(self._sections):
            inputs, outputs = self._inputs[place], self._outputs[place]
            if not section.name:
                _call(section.nodes, values, prepared)
                continue

            def part(
                given: list[Any],
                nodes: list[Any] = section.nodes,
                inputs: list[int] = inputs,
                outputs: list[int] = outputs,
            ) -> list[Any]:
                own = dict(zip(inputs, given, strict=True))
                _call(nodes, own, prepared)
                return [own[x] for x in outputs]

            given = [values[x] for x in inputs]
            own = self._variables[place]
            results = computed_again(section.name, part, given, own, of_task)
            values |= dict(zip(outputs, results, strict=True))


def _call(nodes: Sequence[Any], values: dict[int, Any], prepared: Callable[[Any], Any]) -> None:
    for node in nodes:
        args, kwargs = node.arguments.fill_in(values)
        results = prepared(node.operation)(*args, **kwargs)
        values |= zip(map(id, node.outputs), keras.tree.flatten(results), strict=True)


def patch(model: Functional) -> None:
    """Makes a model run by its chain where the current microbatch has one; else as in Keras."""
    model._run_through_graph = functools.partial(_run_through_graph, model)


def _run_through_graph(
    model: Functional,
    inputs: Any,
    operation_fn: Callable[[Any], Any] = lambda operation: operation,
    call_fn: Any = None,
) -> Any:
    given = keras.tree.flatten(inputs)
    parts = chain = None
    if call_fn is None and is_traced(given):
        current = microbatch.current()
        parts = None if current is None else current.remat
        chain = None if parts is None else parts.chains.get(id(model))
    if parts is None or chain is None:
        return type(model)._run_through_graph(model, inputs, operation_fn, call_fn)
    values = dict(zip(map(id, model.inputs), given, strict=True))
    chain.run(values, operation_fn, parts.variables)
    outputs = [values[id(x)] for x in model.outputs]
    return keras.tree.pack_sequence_as(model._outputs_struct, outputs)


def is_traced(values: Sequence[Any]) -> bool:
    """Returns whether a call with these arguments belongs to the graph of a pass."""
    return not tf.executing_eagerly() and not any(isinstance(x, keras.KerasTensor) for x in values)
