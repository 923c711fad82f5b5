"""Checks of evaluation data, and errors of data that are being read."""

import os
import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.data import BatchPipeline, Source, image_folder, subset, tf_records
from ddl.data.checks import data_errors
from ddl.errors import ConfigError, DataError
from ddl.step.replicas import distributed_iterator
from ddl.tasks.checks import check_data
from tests.conftest import make_strategy
from tests.data.test_source import png


def read(source, batches=20):
    """Reads batches as a loop on the devices does."""
    pipeline = BatchPipeline(source, 2, shuffle=False)
    iterator = distributed_iterator(pipeline, make_strategy("one_device", 1))

    @tf.function
    def loop():
        for _ in tf.range(batches):
            next(iterator)

    loop()


def test_an_example_that_cannot_be_decoded_is_named():
    good = tf.io.encode_png(np.zeros([1, 1, 1], np.uint8)).numpy()
    source = subset(Source([{"png": good}] * 5 + [{"png": good[:20]}], png), [0, 5])
    message = r"\d+: png failed on item 5 of list: .*PNG.* Correct or remove it.$"
    with pytest.raises(DataError, match=message) as caught, data_errors(source):
        read(source)
    assert "Iterator" not in str(caught.value)
    assert "node" not in str(caught.value)


def test_a_file_that_cannot_be_decoded_is_named(folder, tmp_path):
    shutil.copytree(folder / "images", tmp_path / "images")
    damaged = tmp_path / "images" / "2" / "05.png"
    damaged.write_bytes(damaged.read_bytes()[:40])
    source = image_folder(tmp_path / "images", (4, 4))
    with pytest.raises(DataError, match=f"failed on {damaged}: .*remove it"), data_errors(source):
        read(source)


def test_labels_of_text_are_refused():
    task = ddl.Classification(ddl.models.mlp((4,), 2))
    source = Source({"input": np.zeros([2, 4]), "label": ["cat", "dog"]})
    with pytest.raises(DataError, match="must be integers from 0 to 1 .* got .*'label': text"):
        check_data(task, {"": source})


class Broken(list):
    def __getitem__(self, number):
        return {"x": 1 / (5 - number)}


def test_the_error_of_a_reader_keeps_its_cause():
    source = Source(Broken(range(6)))
    with pytest.raises(DataError, match="could not read item 5") as caught, data_errors(source):
        read(source)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


DISKS = [(OSError(5, "broken"), OSError), (FileNotFoundError(2, "gone"), DataError)]


@pytest.mark.parametrize(("error", "raised"), DISKS)
def test_an_error_of_a_disk_passes_unless_it_repeats(error, raised, folder, monkeypatch):
    """A launcher starts a run again after an error that may not come again."""

    def fail(*_):
        raise error

    source = tf_records(f"{folder}/*.tf")
    monkeypatch.setattr(os, "pread", fail)
    with pytest.raises(raised, match=error.strerror), data_errors(source):
        read(source)


def test_integers_are_scaled_by_default_and_floats_are_left_alone():
    pixels, label = np.random.default_rng(0).integers(0, 256, (6, 4), np.uint8), np.arange(6) % 2
    outputs = []
    for x in (pixels, np.float32(pixels / 255)):
        keras.utils.set_random_seed(1)
        task = ddl.Classification(ddl.models.mlp((4,), 2))
        outputs.append(ddl.Trainer(task, "sgd", (x, label), global_batch_size=6).model(x))
    np.testing.assert_allclose(*outputs, rtol=1e-5)
    with pytest.raises(ConfigError, match="Set the model's input_scale.*uint8.*float64"):
        check_data(task, {"labelled": Source({"a": pixels}), "other": Source({"b": pixels / 255})})
