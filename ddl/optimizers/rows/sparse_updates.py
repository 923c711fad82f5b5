"""Optimizers whose updates read and write only rows with a gradient."""

from collections.abc import Mapping, Sequence

import keras

from ddl.optimizers.fused import Fused
from ddl.optimizers.fused_sgd import MomentumSGD


def updates_rows(optimizer: keras.optimizers.Optimizer) -> bool:
    """Returns whether an optimizer updates only the rows of a sparse gradient."""
    if isinstance(optimizer, Fused):
        return optimizer.supports_sparse_updates()
    is_sgd = type(optimizer) is keras.optimizers.SGD or type(optimizer) is MomentumSGD
    return is_sgd and not optimizer.momentum


def variables_by_rows(
    optimizers: Mapping[str, keras.optimizers.Optimizer],
    variables: Mapping[str, Sequence[keras.Variable]],
) -> set[int]:
    """Returns `id` of each variable of which its optimizer updates only rows, both by name."""
    return {
        id(variable)
        for name, own in variables.items()
        if updates_rows(optimizers[name])
        for variable in own
    }
