"""Tracebacks of errors in a user's call: the user's lines and ddl's message."""

import traceback

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from tests.conftest import make_strategy

IMAGES = np.ones([8, 3], "f4")
OWN = (ddl.errors.DataError, ddl.errors.ConfigError, KeyboardInterrupt)
LABELS = np.arange(8) % 2


@pytest.fixture(autouse=True)
def _hidden():
    ddl.debug(False)
    yield
    ddl.debug()


def raises(value):
    raise ValueError("within a loop")


class Task(ddl.Classification):
    fails = None

    def per_example(self, features, training):
        found = super().per_example(features, training)
        if self.fails == "scalar":
            return found._replace(loss=tf.reduce_mean(found.loss))
        if self.fails == "error":
            raise ValueError("of the user's own")
        if self.fails == "assert":
            tf.debugging.assert_less(features["image"], -100.0)
        if self.fails == "python" and not tf.executing_eagerly():
            factor = tf.ensure_shape(tf.py_function(raises, [0], "float32"), [])
            return found._replace(loss=factor * found.loss)
        if self.fails == "key":
            features["missing"]
        if self.fails == "interrupt":
            raise KeyboardInterrupt
        return found


def train(data=(IMAGES, LABELS), steps=1, fails=None, **arguments):
    with make_strategy("one_device", 1).scope():
        task = Task(keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)]))
        trainer = ddl.Trainer(
            task, keras.optimizers.SGD(0.1), data, **{"global_batch_size": 8, **arguments}
        )
        task.fails = fails
        return trainer.train(steps)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"data": (IMAGES, LABELS.astype("f4"))}, ddl.errors.DataError, "Labels must be integers"),
        ({"data": (IMAGES[:, :2], LABELS)}, ddl.errors.DataError, "has shape (2,)"),
        ({"data": {"image": IMAGES}}, ddl.errors.DataError, "no feature 'label'"),
        ({"global_batch_size": "8"}, ddl.errors.ConfigError, "global_batch_size"),
        ({"steps": 1.5}, ddl.errors.ConfigError, "steps must be an integer"),
        ({"fails": "scalar"}, ddl.errors.ConfigError, "got a scalar loss"),
        ({"fails": "error"}, ValueError, "of the user's own"),
        ({"fails": "assert"}, tf.errors.InvalidArgumentError, "assertion failed: "),
        ({"fails": "python"}, tf.errors.InvalidArgumentError, "ValueError: within a loop"),
        ({"fails": "key"}, KeyError, "missing"),
        ({"fails": "interrupt"}, KeyboardInterrupt, ""),
    ],
)
def test_the_users_lines_and_the_message(arguments, error, message):
    with pytest.raises(error) as raised:
        train(**arguments)
    text = "".join(traceback.format_exception(raised.value))
    assert message in text
    assert "site-packages" not in text
    assert "in train\n" in text
    assert ("ddl.debug()" in text) == (error not in OWN)
    assert "/ddl/" not in text
    assert len(text.splitlines()) <= 15, text


@pytest.mark.parametrize(
    "arguments", [{"loss": "msee"}, {"metrics": ["acuracy"]}, {"metrics": ["MeanIoU"]}]
)
def test_a_task_names_its_bad_argument(arguments):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    with pytest.raises(ddl.errors.ConfigError) as raised:
        ddl.Supervised(model, **{"loss": "mse", **arguments})
    text = "".join(traceback.format_exception(raised.value))
    assert len(text.splitlines()) <= 15, text


def test_generators_and_checkpoints_hide_frames_too(tmp_path):
    def made(units):
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(units)])
        data = (IMAGES, LABELS)
        return ddl.Trainer(ddl.Classification(model), "sgd", data, global_batch_size=8)

    trainer = made(2)
    saving = ddl.Checkpoints(tmp_path, trainer)
    saving.save()
    saving.finish()
    other = ddl.Checkpoints(tmp_path, made(3))
    for call, error in (
        (lambda: list(trainer.predict_batches({"label": LABELS})), ddl.errors.DataError),
        (other.restore_latest, ddl.errors.ModelDirectoryError),
        (other.restore_model, ddl.errors.ModelDirectoryError),
    ):
        with pytest.raises(error) as raised:
            call()
        text = "".join(traceback.format_exception(raised.value))
        assert len(text.splitlines()) <= 15, text


def test_debug_shows_all():
    ddl.debug()
    with pytest.raises(ddl.errors.ConfigError) as raised:
        train(steps=1.5)
    assert "length_in_steps" in "".join(traceback.format_exception(raised.value))
