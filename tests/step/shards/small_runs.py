"""Small trainers with `batch_shards`, in a process of their own.

    python -m tests.step.shards.small_runs

prints JSON: for each case, the message of the error, or what was found.
"""

import json
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

import ddl
from ddl.distribution import build_strategy
from ddl.distribution.devices import configure_devices
from ddl.errors import ConfigError

_RANDOM = np.random.default_rng(0)
DATA = {"image": _RANDOM.normal(size=[32, 6]).astype("f4"), "label": np.arange(32) % 3}


class GathersInEvaluation(ddl.Classification):
    """Counts the rows that an evaluation gathers."""

    def per_example(self, features, training):
        found = super().per_example(features, training)
        if training:
            return found
        rows = ddl.gather(found.loss).rows
        return ddl.PerExample(found.loss, {"rows": 0 * found.loss + rows.shape[0]})


class DrawsInEvaluation(ddl.Classification):
    """Adds noise of `tf.random` to the loss of an evaluation."""

    def per_example(self, features, training):
        found = super().per_example(features, training)
        if training:
            return found
        return ddl.PerExample(found.loss + tf.random.uniform(found.loss.shape))


def _trainer(task, inner, shards, strategy):
    with strategy.scope():
        keras.utils.set_random_seed(1)
        layers = [keras.Input((6,)), *inner(), keras.layers.Dense(3, dtype="float32")]
        return ddl.Trainer(
            task(keras.Sequential(layers)),
            keras.optimizers.SGD(0.1),
            DATA,
            eval_data=DATA,
            global_batch_size=16,
            batch_shards=shards,
            strategy=strategy,
        )


def _evaluated(task, strategy):
    try:
        return _trainer(task, list, 4, strategy).evaluate()
    except ConfigError as error:
        return str(error)


def _moving_values(shards, strategy):
    def renormalized():
        return [keras.layers.BatchNormalization(renorm=True, synchronized=True, name="norm")]

    trainer = _trainer(ddl.Classification, renormalized, shards, strategy)
    trainer.train(3, progress=False)
    norm = trainer.model.get_layer("norm")
    return {v.name: v.numpy().tolist() for v in norm.non_trainable_variables}


def main():
    """Runs all cases."""
    configure_devices(2, same_bits=True)
    one, two = build_strategy("one_device"), build_strategy("mirrored")
    found = {
        "gather": [_evaluated(GathersInEvaluation, each) for each in (one, two)],
        "draw": _evaluated(DrawsInEvaluation, one),
        "renorm": [_moving_values(*case) for case in ((None, one), (4, one), (4, two))],
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
