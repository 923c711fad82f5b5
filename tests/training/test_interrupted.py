"""Training that an interrupt or an error ends: what the trainer says then, and what it refuses."""

import os
import signal

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl import microbatch
from ddl.errors import ConfigError, DataError
from tests.conftest import make_strategy

STEPS = 100_000
BAD = 40
IMAGES = np.random.default_rng(0).normal(size=(64, 3)).astype("f4")
DATA = {"image": IMAGES, "label": np.arange(64) % 2}


class InterruptedAt(ddl.Classification):
    """Sends SIGINT from within the loop with the given batch."""

    def __init__(self, model, batch):
        super().__init__(model)
        self.batch = batch

    def per_example(self, features, training):
        current = microbatch.current()
        if current is not None and training:
            tf.py_function(self._send, [current.counter[1]], [])
        return super().per_example(features, training)

    def _send(self, batch):
        if int(batch) == self.batch:
            os.kill(os.getpid(), signal.SIGINT)


def make_trainer(batch=-1, data=DATA, strategy=None, **arguments):
    keras.utils.set_random_seed(3)
    with (strategy or make_strategy("one_device", 1)).scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        task = InterruptedAt(model, batch) if batch >= 0 else ddl.Classification(model)
        return ddl.Trainer(
            task,
            keras.optimizers.SGD(0.1, momentum=0.9),
            data,
            eval_data=data,
            global_batch_size=8,
            **arguments,
        )


def values(trainer):
    return [v.numpy() for v in [*trainer.model.variables, *trainer.optimizer.variables]]


def updates(trainer):
    return trainer.step, int(trainer.optimizer.iterations.numpy())


def test_an_interrupt_ends_the_loop_and_keeps_its_state(tmp_path):
    trainer = make_trainer(3, steps_per_loop=STEPS, strategy=make_strategy("mirrored", 2))
    with pytest.raises(KeyboardInterrupt):
        trainer.train(STEPS)
    step, iterations = updates(trainer)
    assert 3 < step == iterations < STEPS
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    checkpoints = ddl.Checkpoints(tmp_path, trainer)
    checkpoints.save()
    checkpoints.finish()
    other = make_trainer(strategy=trainer.strategy)
    ddl.Checkpoints(tmp_path, other).restore_latest()
    for each in (trainer, other):  # the request to stop is not for this one
        each.train(2)
        assert updates(each) == (step + 2, step + 2)
    for value, expected in zip(values(other), values(trainer), strict=True):
        np.testing.assert_array_equal(value, expected)


def broken():
    """A stream that cannot be read from example 40 on, in order."""

    def read(number, image, label):
        check = tf.debugging.assert_less(number, tf.constant(BAD, tf.int64), "unreadable")
        with tf.control_dependencies([check]):
            return tf.identity(image), label

    examples = tf.data.Dataset.from_tensor_slices((IMAGES, DATA["label"])).enumerate()
    return examples.map(lambda number, example: read(number, *example))


def test_an_error_in_the_loop_is_not_gone_on_from(tmp_path):
    trainer = make_trainer(data=broken(), shuffle=False, steps_per_loop=100)
    checkpoints = ddl.Checkpoints(tmp_path, trainer)
    trainer.train(1)
    checkpoints.save()
    checkpoints.finish()
    saved = values(trainer)
    with pytest.raises(DataError, match="unreadable"):
        trainer.train(100)
    assert trainer.step == 1 < updates(trainer)[1]
    for refused in (lambda: trainer.train(1), trainer.evaluate, checkpoints.save):
        with pytest.raises(ConfigError, match=r"after step 1, .*Restore a checkpoint"):
            refused()
    checkpoints.restore_latest()
    assert updates(trainer) == (1, 1)
    for value, expected in zip(values(trainer), saved, strict=True):
        np.testing.assert_array_equal(value, expected)
    checkpoints.save()
