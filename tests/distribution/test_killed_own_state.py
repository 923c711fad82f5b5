"""A task with variables of its own on two workers, killed by SIGKILL: it ends to the bit the same.

Its step reads further batches in turns, and writes a queue, a centre, a counter and a target.
"""

import os
import re
import signal

import numpy as np
import pytest

from tests.distribution.test_killed_workers import LIMITS, Watched
from tests.distribution.whole_clusters import assert_none_left, launch, processes_of
from tests.run.whole_runs import ROOT, lines, tensors

STEPS = 300
OWN = ("queue", "center", "seen")

TASK = '''
import ddl
import gin
import keras
import tensorflow as tf


@gin.register
class Remembers:
    """Keeps the mean outputs of its last batches, and centres the outputs by them."""

    def __init__(self):
        layers, floatx = keras.layers, keras.config.floatx()
        self.model = keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                layers.Rescaling(1 / 16),
                layers.Flatten(),
                layers.Dense(16, "tanh"),
                ddl.layers.Dropout(0.3),
                layers.Dense(10),
            ]
        )
        self.target = keras.models.clone_model(self.model)
        self.target.set_weights(self.model.get_weights())
        self.queue = tf.Variable(tf.zeros([4, 10], floatx), trainable=False)
        self.center = tf.Variable(tf.zeros([10], floatx), trainable=False)
        self.seen = tf.Variable(0, trainable=False, dtype=tf.int64)

    def outputs(self, features, training):
        return self.target(features["image"], training=training)

    def per_example(self, features, training):
        logits = self.model(features["image"], training=training) - self.center
        loss = tf.nn.sparse_softmax_cross_entropy_with_logits(features["label"], logits)
        return ddl.PerExample(loss)

    def step(self, update, batch):
        for _ in range(2):
            further = update.next(batch)
            update.minimize(self.per_example, further)
            row = update.mean(self.outputs, further)
            self.queue.assign(tf.concat([self.queue[1:], row[tf.newaxis]], axis=0))
            self.seen.assign_add(1)

        update.average(self.target, of=self.model, decay=0.9)
        noise = ddl.random.normal(self, (10,), shared=True)
        drawn = 0.01 * tf.cast(noise, self.center.dtype)
        self.center.assign(0.9 * self.center + 0.1 * tf.reduce_mean(self.queue, axis=0) + drawn)
'''

CONFIG = f"""
import remembers
include '{ROOT}/configs/digits_cnn.gin'

Trainer.task = @Remembers()
PRECISION = 'float32'
TRAIN_STEPS = {STEPS}
CHECKPOINT_EVERY = 10
LOG_EVERY = 10
EVAL_EVERY = None
STEPS_PER_EPOCH = 8  # an update reads three of an epoch's 23 batches
"""


def newest(model_dir) -> int:
    """Returns the step of the newest checkpoint, or 0."""
    names = [path.name for path in (model_dir / "checkpoints").glob("step-*.index")]
    return max((int(re.findall(r"\d+", name)[0]) for name in names), default=0)


def kill(processes) -> None:
    for number in processes:
        os.kill(number, signal.SIGKILL)


@pytest.mark.slow
def test_killed_it_ends_the_same(tmp_path):
    """First one worker, which the launcher restarts; then all processes of the run."""
    (tmp_path / "remembers.py").write_text(TASK)
    (tmp_path / "remembers.gin").write_text(CONFIG)

    def start(model_dir):
        flags = [f"--gin_file={tmp_path}/remembers.gin", f"--model_dir={model_dir}", "--mode=train"]
        return Watched(launch(2, *flags, *LIMITS, launcher=["--max_restarts=1"]), model_dir)

    straight, model_dir = tmp_path / "straight", tmp_path / "run"
    watched = start(straight)
    watched.process.wait(timeout=300)
    assert watched.process.returncode == 0, watched.text()

    watched = start(model_dir)
    try:
        watched.wait(lambda: newest(model_dir) >= 20)
        kill([watched.workers(2)[1]])
        watched.wait(lambda: "Restart 1 of 1" in watched.text())
        reached = newest(model_dir)
        watched.wait(lambda: newest(model_dir) > reached)
        kill([watched.process.pid, *processes_of(model_dir).values()])
        watched.process.wait(timeout=60)
    finally:
        watched.process.kill()
    assert_none_left(model_dir)
    assert f"Restored step {reached}" in watched.text()
    assert 20 < newest(model_dir) < STEPS, "it was done too soon"

    watched = start(model_dir)
    watched.process.wait(timeout=300)
    assert watched.process.returncode == 0, watched.text()
    assert "Restored step" in watched.text()
    ours, theirs = tensors(model_dir), tensors(straight)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        np.testing.assert_array_equal(ours[name], value, err_msg=name)
    found = {own: v for own in OWN for name, v in theirs.items() if f"/{own}/" in f"/{name}/"}
    assert found.keys() == set(OWN), sorted(theirs)
    assert found["seen"] == 2 * STEPS
    assert found["queue"].all()
    assert found["center"].all()
    assert lines(model_dir) == lines(straight)
