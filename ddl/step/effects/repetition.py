"""A warning of operations that do not repeat their bits on CPUs.

Their kernels let several threads add to one place, in the order in which the threads come.
"""

from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from absl import logging
from tensorflow.core.framework import types_pb2
from tensorflow.python.framework.config import is_op_determinism_enabled

from ddl.step.effects.stateful import with_called

_FLOATS = {types_pb2.DT_HALF, types_pb2.DT_BFLOAT16, types_pb2.DT_FLOAT, types_pb2.DT_DOUBLE}
# What adds in varying order, with the attribute of the summed dtype, and what it computes.
_VARY = {
    "CropAndResizeGradImage": ("T", "the gradient of tf.image.crop_and_resize by its images"),
    "ResourceScatterAdd": ("dtype", "Variable.scatter_add of repeated rows"),
    "ResourceScatterSub": ("dtype", "Variable.scatter_sub of repeated rows"),
    **{
        kind: ("T", "tf.math.bincount with weights")
        for kind in ("Bincount", "DenseBincount", "SparseBincount", "RaggedBincount")
    },
}
_CALLS = {
    *("While", "StatelessWhile", "If", "StatelessIf", "Case", "StatelessCase"),
    *("PartitionedCall", "StatefulPartitionedCall"),
}


def warn_of_unordered_sums(graph: tf.Graph) -> None:
    """Logs the operations of a traced update whose bits a repeated run may not repeat."""
    for kind in sorted(set(_kinds(graph))):
        mended = "Bincount" not in kind
        if mended and is_op_determinism_enabled():
            continue
        logging.warning(
            "The update computes %s (%s), which adds in varying order: a repeated or resumed run "
            "agrees up to rounding, not bit for bit. %s",
            _VARY[kind][1],
            kind,
            "--deterministic_ops mends it."
            if mended
            else "--deterministic_ops does not mend it; sum rows of tf.one_hot instead.",
        )


def _kinds(graph: Any) -> Iterator[str]:
    seen: set[str] = set()
    for operation in graph.get_operations():
        if operation.type in _VARY or operation.type in _CALLS:
            for node in with_called(graph, operation.node_def, seen):
                if node.op in _VARY and node.attr[_VARY[node.op][0]].type in _FLOATS:
                    yield node.op
