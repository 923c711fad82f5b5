"""A small trainer for the tests of callbacks, and what its runs wrote."""

import json

import keras
import numpy as np
import tensorflow as tf

import ddl
from tests.conftest import make_strategy

RANDOM = np.random.default_rng(0)
IMAGES = RANDOM.normal(size=(40, 3)).astype("f4")
DATA = {"image": IMAGES, "label": (IMAGES.sum(1) > 0).astype("i4")}
PLAN = {"train_steps": 12, "eval_every": 4, "checkpoint_every": 3, "log_every": 6}


class Weighted(ddl.Classification):
    """A task whose loss has a weight that a callback may change."""

    def __init__(self, model):
        super().__init__(model)
        self.weight = tf.Variable(1.0, trainable=False)

    def per_example(self, features, training):
        output = super().per_example(features, training)
        return output._replace(loss=self.weight * output.loss)


def make_trainer(data=None, replicas=1, **arguments):
    data = DATA if data is None else data
    keras.utils.set_random_seed(3)
    with make_strategy("one_device" if replicas == 1 else "mirrored", replicas).scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        return ddl.Trainer(
            Weighted(model),
            keras.optimizers.SGD(0.1),
            data,
            **{"eval_data": data, "global_batch_size": 8, "steps_per_loop": 100, **arguments},
        )


def fit(trainer, folder, *callbacks, **plan):
    return ddl.fit(trainer, folder, callbacks=callbacks, progress=False, **{**PLAN, **plan})


def weights(trainer):
    return [v.numpy() for v in [*trainer.model.variables, *trainer.optimizer.variables]]


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def events(folder, split):
    """Returns (step, tag, plugin) of each summary in the event files of a split."""
    found = []
    for path in sorted((folder / split).glob("events.out.tfevents.*")):
        for record in tf.data.TFRecordDataset(str(path)).as_numpy_iterator():
            event = tf.compat.v1.Event.FromString(record)
            found += [
                (event.step, value.tag, value.metadata.plugin_data.plugin_name)
                for value in event.summary.value
            ]
    return found
