"""Losses that are probed on rows of zeros, without a trainer."""

import types

import tensorflow as tf

from ddl.step.loss import Loss
from ddl.step.probes import Probes


def probed(task, spec, batch_size, strategy):
    """Returns the loss of a task, probed for training and for an evaluation."""
    pipeline = types.SimpleNamespace(
        element_spec={**spec, "weight": tf.TensorSpec([], tf.float32)},
        global_batch_size=batch_size,
        microbatches=1,
        num_examples=None,
        source=None,
        first_examples=lambda count: {
            name: tf.zeros([count, *one.shape], one.dtype) for name, one in spec.items()
        },
    )
    probes = Probes(task, strategy, [])
    loss = Loss(
        *(task, task.per_example, "", batch_size),
        lambda loss, training: probes.form(loss, pipeline, training),
        strategy.num_replicas_in_sync,
    )
    for training in (False, True):
        loss.form(training)
    return loss
