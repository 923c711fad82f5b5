"""The gradient path after the all-reduce: unscale → penalties → clip → apply.

Before it comes the finite check (`ddl.step.overflow`). Both concern the gradient of the global
batch and therefore come after the all-reduce, where every replica holds the same values. Keras 3
clips and checks before the all-reduce, on each replica's own share.
"""

from ddl.step.gradients.clipping import (
    Limit,
    clip_by_global_norm,
    clips_by_name,
    squared_norm,
)
from ddl.step.gradients.penalties import add_regularization, of_penalties
from ddl.step.gradients.preparation import (
    check_none_left_out,
    check_used,
    left_out,
    prepare_optimizer,
)
from ddl.step.gradients.values import (
    Gradient,
    in_pairs,
    multiply,
    opaque,
    packs,
    values_of,
    widest,
    with_each_row_once,
    with_values,
)

__all__ = [
    "Gradient",
    "Limit",
    "add_regularization",
    "check_none_left_out",
    "check_used",
    "clip_by_global_norm",
    "clips_by_name",
    "in_pairs",
    "left_out",
    "multiply",
    "of_penalties",
    "opaque",
    "packs",
    "prepare_optimizer",
    "squared_norm",
    "values_of",
    "widest",
    "with_each_row_once",
    "with_values",
]
