"""Start-up notes on large embedding tables that an update moves as a whole."""

import keras
from absl import logging

from ddl.optimizers.fused import updates_rows
from ddl.step.rows import table_of
from ddl.step.train_step import TrainStep

_LARGE = 2**20
"""Entries of a table from which a dense update takes noticeable time."""


def warn_of_dense_updates(update: TrainStep) -> None:
    """Logs for each large table that is read by rows why updates take time for all of its rows.

    Args:
      update: The update, with its optimizers built.
    """
    tables = [
        one.training.tables for one in (*update.plan.losses.values(), *update.plan.means.values())
    ]
    for name, own in update.plan.applied.items():
        for variable in own.variables:
            reads = [table_of(variable, found, update.strategy) for found in tables]
            found = [read for read in reads if read is not None]
            if not found or variable.value.shape.num_elements() < _LARGE:
                continue
            averaged = update.averages is not None
            reasons = _reasons(update.optimizers[name], variable, averaged)
            if update.sharding is not None:
                reasons.append("--shard_optimizer_state sends dense gradients (leave it out)")
            if any(read.as_a_whole for read in found):
                reasons.append(
                    "a layer reads the whole table to look up rows (in a layer of your own, call "
                    "ddl.layers.look_up instead of tf.gather)"
                )
            if reasons:
                logging.warning(
                    "Each update takes time for all %s rows of the table %s, not for those of the "
                    "batch alone: %s. The result is right. docs/large-embeddings.md says which "
                    "updates are sparse.",
                    f"{variable.shape[0]:,}",
                    variable.path,
                    "; ".join(reasons),
                )


def _reasons(
    optimizer: keras.optimizers.Optimizer, variable: keras.Variable, averaged: bool
) -> list[str]:
    reasons = []
    if not updates_rows(optimizer):
        reasons.append(
            f"{type(optimizer).__name__} computes on all rows (Adagrad and SGD without "
            "momentum do not; ParameterGroups gives the table an optimizer of its own)"
        )
    if optimizer.weight_decay and optimizer._use_weight_decay(variable):
        reasons.append(
            "weight_decay decays all rows (exclude the table with exclude_from_weight_decay)"
        )
    if variable.regularizer is not None:
        reasons.append("its regularizer has a gradient for all rows (remove it)")
    if variable.constraint is not None:
        reasons.append("its constraint changes all rows (remove it)")
    if averaged:
        reasons.append("weight_average moves the averages of all rows (remove it)")
    return reasons
