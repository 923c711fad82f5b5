"""The phases of an update as name scopes, by which a profile of its operations is read."""

import re
from contextlib import AbstractContextManager
from typing import Literal, get_args

import tensorflow as tf

Phase = Literal["forward", "backward", "all_reduce", "update"]
"""Forward pass, backward pass, all-reduce of gradients and sums, clipping and optimizer."""

PHASES: tuple[str, ...] = get_args(Phase)

# In a name such as while/replica_1/ddl_forward_1/mlp/dense/MatMul. The gradient of an operation
# has the name of that operation behind "gradient_tape/".
_SCOPE = re.compile(rf"(?:^|/)ddl_({'|'.join(PHASES)})(?:_\d+)?/")


def phase(name: Phase) -> AbstractContextManager[str]:
    """Returns a name scope for the operations of a phase; any context, in a graph."""
    return tf.name_scope(f"ddl_{name}")


def phase_of(operation: str) -> str | None:
    """Returns the phase of an operation by its name; None if it belongs to no phase."""
    if found := _SCOPE.search(operation):
        return "backward" if "gradient_tape/" in operation else found[1]
    return None
