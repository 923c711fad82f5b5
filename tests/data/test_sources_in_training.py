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

CLASSES, COUNT = 3, 22
_RANDOM = np.random.default_rng(0)
IMAGES = _RANDOM.integers(0, 255, (COUNT, 4, 4, 1)).astype(np.uint8)
LABELS = np.arange(COUNT) % CLASSES


def image_folder(folder, images=IMAGES, labels=LABELS):
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        file = folder / str(label) / f"{number:03}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        tf.io.write_file(str(file), tf.io.encode_png(image))
    return ddl.data.ImageFolder(folder, (4, 4, 1))


def memory_mapped(folder):
    np.save(folder / "images.npy", IMAGES)
    np.save(folder / "labels.npy", LABELS)
    files = {"image": str(folder / "images.npy"), "label": str(folder / "labels.npy")}
    return ddl.data.numpy_files(files, in_memory=False)


def mixture(folder):
    images = image_folder(folder / "images", IMAGES[:9], LABELS[:9])
    return ddl.data.Mixture([images, ddl.data.subset((IMAGES, LABELS), first=13)], [0.4, 0.6])


SOURCES = {make.__name__: make for make in (image_folder, memory_mapped, mixture)}


def trainer_on(source, replicas):
    set_precision("float64")
    keras.utils.set_random_seed(0)
    strategy = make_strategy("mirrored" if replicas > 1 else "one_device", replicas)
    with strategy.scope():
        model = ddl.models.mlp((4, 4, 1), CLASSES, hidden_units=(4,), input_scale=1 / 255)
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        return ddl.Trainer(ddl.Classification(model), optimizer, source, global_batch_size=8)


def test_labels_that_mean_other_classes_in_the_evaluation_are_refused(tmp_path):
    train = image_folder(tmp_path / "train")
    evaluation = image_folder(tmp_path / "eval", IMAGES, np.where(LABELS == 1, 2, LABELS))
    model = ddl.models.mlp((4, 4, 1), CLASSES, hidden_units=(4,))
    arguments = {"global_batch_size": 8, "eval_data": evaluation}
    with pytest.raises(DataError, match="data are 0, 1, 2, those of the evaluation data 0, 2, so"):
        ddl.Trainer(ddl.Classification(model), keras.optimizers.SGD(0.1), train, **arguments)


@pytest.mark.parametrize("make", SOURCES.values(), ids=SOURCES.keys())
def test_the_same_on_two_replicas_and_resumed_in_an_epoch(make, tmp_path):
    source = make(tmp_path)
    straight, parted = trainer_on(source, 1), trainer_on(source, 2)
    straight.train(2)
    path = tmp_path / "saved"
    save(path, straight)
    straight.train(3)
    parted.train(5)
    for one, two in zip(straight.model.variables, parted.model.variables, strict=True):
        np.testing.assert_allclose(one, two, rtol=0, atol=1e-10)
    expected = [v.numpy() for v in straight.model.variables]
    Checkpoints(path, straight).restore_latest()
    straight.train(3)
    for one, two in zip(straight.model.variables, expected, strict=True):
        np.testing.assert_array_equal(one, two)
