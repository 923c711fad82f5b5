"""Checks before training: workers whose data differ, and settings that are fixed."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.data import BatchPipeline
from ddl.errors import ConfigError, DataError
from ddl.training import checks
from ddl.training.actions import EachLoop
from tests.conftest import make_strategy


def written(folder):
    """Files of records, each of which is a number."""
    files, numbers = [], iter(range(6))
    for place, length in enumerate((1, 3, 2)):
        files.append(str(folder / f"part-{place}"))
        with tf.io.TFRecordWriter(files[-1]) as file:
            for _ in range(length):
                file.write(str(next(numbers)).encode())
    return files


def decode(item, seed):
    return {"x": tf.strings.to_number(item["record"], tf.int64)}


class Worker:
    """One of two workers, each in a thread."""

    number = 2

    def __init__(self, index, texts, both):
        self.index, self.texts, self.both = index, texts, both

    def barrier(self):
        self.both.wait(10)

    def gather_texts(self, text):
        self.texts[self.index] = text
        self.barrier()
        found = list(self.texts)
        self.barrier()
        return found


@pytest.fixture
def difference(monkeypatch):
    """Checks data on two workers; returns the error, which both raise, or None."""
    monkeypatch.setattr(checks, "Workers", lambda strategy: strategy)

    def checked(here, there):
        pipelines = [BatchPipeline(ddl.data.as_source(data), 4) for data in (here, there)]
        texts, both = [None, None], threading.Barrier(2)

        def on_worker(index):
            try:
                data = pipelines[index]
                checks.check_same_data(Worker(index, texts, both), {"": data}, data)
            except DataError as error:
                return str(error)
            return None

        with ThreadPoolExecutor(2) as threads:
            one, two = threads.map(on_worker, range(2))
        assert one == two
        return one

    return checked


def test_equal_data_pass(difference, tmp_path):
    for make in (
        lambda: {"x": np.arange(6), "name": ["a"] * 6},
        lambda: ddl.data.tf_records(written(tmp_path), decode=decode),
        lambda: tf.data.Dataset.range(3).map(lambda x: {"x": x}),
    ):
        assert difference(make(), make()) is None


def test_a_stream_that_cannot_be_repeated_is_refused(difference):
    tf.random.set_seed(None)
    data = tf.data.Dataset.range(100).shuffle(100).map(lambda x: {"x": x})
    assert "The tf.data.Dataset: two reads of the first examples differ" in difference(data, data)


def test_a_file_that_is_missing_is_found_whatever_its_folder(difference, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    read = lambda paths: ddl.data.tf_records(paths, decode=decode)  # noqa: E731
    files, copies = written(tmp_path), written(other)
    assert difference(read(files), read(copies)) is None
    os.rename(copies[0], renamed := str(other / "another"))
    text = difference(read(files), read([renamed, *copies[1:]]))
    assert "the files of the training data are 3 (digest" in text
    text = difference(read(files), read(files[:2]))
    assert "the examples of the training data are 6 on worker 0 and 4 on worker 1" in text


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ({"x": np.arange(6.0)}, "features of the training data are x int64 () on worker 0 and x"),
        ({"x": np.array([0, 1, 2, 3, 5, 4])}, "the 'x' of the training data are digest"),
    ],
)
def test_arrays_that_differ(difference, other, expected):
    assert expected in difference({"x": np.arange(6)}, other)


def test_floats_that_differ_are_warned_of(difference, caplog):
    """Machines may round a preprocessing differently."""
    rows = np.arange(6.0)
    assert difference({"x": rows, "y": np.arange(6)}, {"x": rows + 1e-9, "y": np.arange(6)}) is None
    assert "the floats 'x' of the training data are" in caplog.text


DATA = {"image": np.ones((8, 3), "f4"), "label": np.arange(8) % 2}


@pytest.fixture
def trainer():
    with make_strategy("one_device", 1).scope():
        layers = [keras.layers.Dense(4, name="hidden"), keras.layers.Dense(2, name="logits")]
        task = ddl.Classification(keras.Sequential([keras.Input((3,)), *layers]))
        return ddl.Trainer(task, keras.optimizers.SGD(0.1), DATA, global_batch_size=4)


def test_attributes_of_a_trainer_are_fixed(trainer):
    for name in ("optimizer", "model", "clip_norm", "seed", "steps_per_epoch", "learning_rate"):
        with pytest.raises(ConfigError, match=rf"trainer\.{name} cannot be .*Create a new Trainer"):
            setattr(trainer, name, None)
    trainer.evaluate = lambda: {"loss": 0.0}  # a method can be replaced
    assert trainer.evaluate() == {"loss": 0.0}


def test_the_trained_variables_are_fixed(trainer):
    def freeze(step):
        trainer.model.get_layer("hidden").trainable = False

    with pytest.raises(ConfigError, match="trainable of layer 'hidden' has no effect: it was True"):
        trainer.train(4, [EachLoop(freeze)])
    trainer.model.get_layer("hidden").trainable = True
    trainer.train(1)
    trainer.model.add(keras.layers.Dense(2, name="more"))
    with pytest.raises(ConfigError, match=r"list of trainable variables of task\.model"):
        trainer.train(1)


def test_a_rate_that_is_a_number_can_be_changed(trainer):
    trainer.train(1)
    before = trainer.model.get_weights()
    trainer.optimizer.learning_rate = 0.0
    trainer.train(1)
    assert trainer.learning_rates == {"learning_rate": 0.0}
    for one, other in zip(trainer.model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(one, other)
