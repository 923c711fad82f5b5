"""A small trainer for the tests of runs, and what its runs wrote."""

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


def make_trainer(replicas=1, class_weight=None, momentum=0.0, rate=0.1, activation=None, **more):
    keras.utils.set_random_seed(3)
    with make_strategy("one_device" if replicas == 1 else "mirrored", replicas).scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, activation)])
        task = ddl.Classification(model, class_weight=class_weight)
        optimizer = keras.optimizers.SGD(rate, momentum=momentum)
        more = {"eval_data": DATA, "global_batch_size": 8, **more}
        return ddl.Trainer(task, optimizer, DATA, **more)


def fit(trainer, folder, *callbacks, **plan):
    plan = {**PLAN, "progress": False, **plan}
    return ddl.fit(trainer, folder, callbacks=[*callbacks], **plan)


def lines(folder, split=("train", "eval")):
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if line["split"] in split]


def summaries(folder):
    """Returns (step, tag, plugin) of each summary in the event files of a folder."""
    return [
        (event.step, value.tag, value.metadata.plugin_data.plugin_name)
        for path in sorted(folder.glob("events.out.tfevents.*"))
        for event in tf.compat.v1.train.summary_iterator(str(path))
        for value in event.summary.value
    ]
