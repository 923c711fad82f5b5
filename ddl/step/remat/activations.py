"""Bytes that a backward pass reads from its forward pass, counted in the traced graph."""

import re
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ddl import microbatch
from ddl.step.compiled.one_replica import is_first_replica

# Operations whose outputs are their inputs, in the same memory.
_ALIASES = {"Identity", "IdentityN", "StopGradient", "Reshape", "Squeeze", "ExpandDims", "Bitcast"}
_NOT_KEPT = {"ReadVariableOp", "Const", "Placeholder"}  # variables count elsewhere
_OF_ANOTHER_REPLICA = re.compile(r"(^|/)replica_[1-9]\d*/")
_PART = re.compile(r"^(.*?again_remat_[^/]*)/")


class Activations:
    """An observer of a trace (`ddl.step.observing`) that counts the activations of a microbatch.

    Counted are the tensors that the forward pass makes and the backward pass reads, and of the
    parts that are computed again those of the largest. TensorFlow may keep less, where it or XLA
    joins operations, and more, for tensors that live only within one operation's gradient.

    Attributes:
      bytes: Bytes of the largest pass on the first replica; None before a trace, or if a tensor has
        no static shape.
      kept: Those that the forward pass keeps for the backward pass; None like `bytes`.
      repeated: Those of the largest part that is computed again.
    """

    def __init__(self) -> None:
        """Counts nothing yet."""
        self.kept: int | None = None
        self.repeated = 0
        self._first = self._middle = 0

    @property
    def bytes(self) -> int | None:
        """See above."""
        return None if self.kept is None else self.kept + self.repeated

    def __call__(self, event: str, **_: Any) -> None:
        """Takes an event."""
        current = microbatch.current()
        if current is None or not current.training or not is_first_replica():
            return
        graph = tf.compat.v1.get_default_graph()
        if event == "rows":
            self._first = graph.num_operations()
        elif event == "backward":
            self._middle = graph.num_operations()
        elif event == "differentiated":
            operations = graph.get_operations()
            self._count(operations[self._first : self._middle], operations[self._middle :])

    def _count(self, forward: Sequence[Any], backward: Sequence[Any]) -> None:
        own = {op.name for op in forward if op.type not in _NOT_KEPT}
        part_of = {op.name: found[1] for op in backward if (found := _PART.match(op.name))}
        kept: dict[str, int | None] = {}
        repeated: dict[str, dict[str, int | None]] = {}
        for operation in backward:
            if _OF_ANOTHER_REPLICA.search(operation.name):
                continue
            for tensor in map(_source, operation.inputs):
                maker = tensor.op.name
                part = part_of.get(maker)
                if maker in own:
                    kept[tensor.name] = _size(tensor)
                elif part is not None and part != part_of.get(operation.name):
                    repeated.setdefault(part, {})[tensor.name] = _size(tensor)
        sizes = [*kept.values(), *(size for part in repeated.values() for size in part.values())]
        if any(size is None for size in sizes):
            return
        largest = max((sum(filter(None, part.values())) for part in repeated.values()), default=0)
        total = sum(filter(None, kept.values()))
        if self.kept is None or total + largest > self.kept + self.repeated:
            self.kept, self.repeated = total, largest


def _source(tensor: Any) -> Any:
    """Returns the tensor whose memory a tensor shares."""
    while tensor.op.type in _ALIASES:
        tensor = tensor.op.inputs[tensor.value_index if tensor.op.type == "IdentityN" else 0]
    return tensor


def _size(tensor: Any) -> int | None:
    """Returns the bytes of a tensor; None without a static shape."""
    if not tensor.shape.is_fully_defined():
        return None
    return int(tensor.shape.num_elements() * tensor.dtype.size)
