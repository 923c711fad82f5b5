"""Training from each kind of source computes the same on several devices and after a resume."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.checkpoints.checkpoints import Checkpoints
from ddl.errors import DataError
from ddl.precision import set_precision
from tests.conftest import make_strategy, save
from tests.data import every_source
from tests.data.every_source import (
    CLASSES,
    IMAGES,
    LABELS,
    SOURCES,
    OneWeightForEachColumn,
    weights,
)

BATCH, BEFORE, STEPS = 8, 2, 5
# An epoch has three batches, so that the run stops in the middle of one and ends in another.


def image_folder(folder, labels):
    for number, (image, label) in enumerate(zip(IMAGES, labels, strict=True)):
        file = folder / str(label) / f"{number:03}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        tf.io.write_file(str(file), tf.io.encode_png(image))
    return ddl.data.ImageFolder(folder, (4, 4, 1))


def test_labels_that_mean_other_classes_in_the_evaluation_are_refused(tmp_path):
    train = image_folder(tmp_path / "train", LABELS)
    evaluation = image_folder(tmp_path / "eval", np.where(LABELS == 1, 2, LABELS))
    model = ddl.models.mlp((4, 4, 1), CLASSES, hidden_units=(4,))
    arguments = {"global_batch_size": 8, "eval_data": evaluation}
    with pytest.raises(DataError, match="data are 0, 1, 2, those of the evaluation data 0, 2, so"):
        ddl.Trainer(ddl.Classification(model), keras.optimizers.SGD(0.1), train, **arguments)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("sources")
    every_source.write(made)
    return made


def trainer_on(folder, replicas):
    set_precision("float64")
    keras.utils.set_random_seed(0)
    strategy = make_strategy("mirrored" if replicas > 1 else "one_device", replicas)
    with strategy.scope():
        task, optimizer = OneWeightForEachColumn(), keras.optimizers.SGD(0.1, momentum=0.9)
    data = every_source.EverySource(folder)
    return ddl.Trainer(task, optimizer, data, global_batch_size=BATCH, strategy=strategy)


@pytest.fixture(scope="module")
def runs(folder):
    """The weights after five updates: straight on 1, 2 and 4 replicas, and resumed."""
    straight, parted = trainer_on(folder, 1), trainer_on(folder, 2)
    straight.train(BEFORE)
    path = folder / "saved"
    save(path, straight)
    straight.train(STEPS - BEFORE)
    found = {"straight": weights(straight)}
    parted.train(STEPS)
    found["on 2"] = weights(parted)
    Checkpoints(path, straight).restore_latest()
    straight.train(STEPS - BEFORE)
    found["resumed"] = weights(straight)
    Checkpoints(path, parted).restore_latest()
    parted.train(STEPS - BEFORE)
    found["resumed on 2"] = weights(parted)
    four = trainer_on(folder, 4)
    four.train(STEPS)
    found["on 4"] = weights(four)
    return found


@pytest.mark.parametrize("name", SOURCES)
def test_the_same_on_several_replicas_and_resumed_in_an_epoch(name, runs):
    expected = runs["straight"][name]
    for run in ("on 2", "on 4", "resumed on 2"):
        for one, two in zip(expected, runs[run][name], strict=True):
            np.testing.assert_allclose(one, two, rtol=0, atol=1e-10, err_msg=run)
    for one, two in zip(expected, runs["resumed"][name], strict=True):
        np.testing.assert_array_equal(one, two)
    for one, two in zip(runs["on 2"][name], runs["resumed on 2"][name], strict=True):
        np.testing.assert_allclose(one, two, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", SOURCES)
def test_two_workers_read_the_rows_of_one_from_any_batch_on(name, folder):
    """To the bit, so that a run resumes on another number of workers."""
    first, count = 2, 5  # from the middle of an epoch into the next one

    def read(rows=None):
        batches = SOURCES[name](folder).batches(BATCH, first, seed=1, shuffle=True, rows=rows)
        return list(batches.take(count).as_numpy_iterator())

    halves = np.split(np.arange(BATCH), 2)
    for whole, *parts in zip(read(), *map(read, halves), strict=True):
        for feature, values in whole.items():
            joined = np.concatenate([part[feature] for part in parts])
            np.testing.assert_array_equal(joined, values, err_msg=feature)


# Features that tell examples apart: the images all differ.
@pytest.mark.parametrize("name", ["image_folder", "records", "items", "py_dataset", "stream"])
def test_every_example_once_an_epoch(name, folder):
    source = SOURCES[name](folder)
    pipeline = ddl.data.BatchPipeline(source, BATCH, seed=1)
    batches = source.batches(BATCH, 3, seed=1, shuffle=True).take(pipeline.steps_per_epoch)
    found = [
        image.tobytes()
        for batch in batches.as_numpy_iterator()
        for image, weight in zip(batch["image"], batch["weight"], strict=True)
        if weight
    ]
    assert sorted(found) == sorted(image.tobytes() for image in IMAGES)
    assert found != [image.tobytes() for image in IMAGES]


GIN = """
import tests.data.every_source
include 'standard.gin'
SEED = 0
PRECISION = 'float64'
GLOBAL_BATCH_SIZE = 8
TRAIN_STEPS = 5
CHECKPOINT_EVERY = 2
Trainer.task = @OneWeightForEachColumn()
Trainer.train_data = @EverySource()
EverySource.folder = FOLDER
Trainer.optimizer = @SGD()
SGD.learning_rate = 0.1
"""
