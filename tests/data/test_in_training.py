"""Training from each kind of data: the same on any devices, and after a resume in an epoch."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.checkpoints.checkpoints import Checkpoints
from ddl.precision import set_precision
from tests.conftest import make_strategy, save
from tests.data.kinds import KINDS, ROWS, X, Y, data_of

UPDATES = 7  # of 8 rows: the second epoch begins with update 5, and update 4 has padding


def make_trainer(data, strategy, **options):
    set_precision("float64")
    keras.utils.set_random_seed(2)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    task = ddl.Classification(model, input_name="image")
    options = {"global_batch_size": 8, "seed": 3, "eval_data": data, **options}
    return ddl.Trainer(task, optimizer, data, strategy=strategy, **options)


def ends_of(trainer, updates=UPDATES):
    trainer.train(updates, progress=False)
    return [*trainer.model.get_weights(), trainer.evaluate()["loss"]]


@functools.cache
def on_one_device(kind, folder):
    """Weights and loss after the last update, and the checkpoint of update 3."""
    trainer = make_trainer(data_of(kind, folder), make_strategy("one_device", 1))
    trainer.train(3, progress=False)
    path = save(folder / kind, trainer)
    return ends_of(trainer, UPDATES - 3), path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("data")


@pytest.mark.parametrize("kind", KINDS)
def test_two_replicas_with_microbatches_end_as_one_device(kind, folder):
    trainer = make_trainer(
        data_of(kind, folder), make_strategy("mirrored", 2), accumulation_steps=2
    )
    for one, other in zip(ends_of(trainer), on_one_device(kind, folder)[0], strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_resumes_in_an_epoch_ends_with_the_same_bits(kind, folder):
    wanted, _ = on_one_device(kind, folder)
    trainer = make_trainer(data_of(kind, folder), make_strategy("one_device", 1))
    Checkpoints(folder / kind, trainer).restore_latest()
    assert trainer.step == 3
    for one, other in zip(ends_of(trainer, UPDATES - 3), wanted, strict=True):
        np.testing.assert_array_equal(one, other)


# What people have, and what they write on their first attempt.
def interleaved():
    parts = tf.data.Dataset.range(4).interleave(
        lambda part: tf.data.Dataset.range(part, ROWS, 4), cycle_length=2
    )
    rows = parts.map(lambda n: (tf.gather(X, n), tf.gather(Y, n)))
    return rows.shuffle(10, seed=1).batch(5).repeat()


def padded():
    def rows():
        for x, y in zip(X, Y, strict=True):
            yield {"image": x[: 2 + y], "label": y}

    spec = {"image": tf.TensorSpec([None], tf.float64), "label": tf.TensorSpec([], tf.int64)}
    ragged = tf.data.Dataset.from_generator(rows, output_signature=spec)
    return ragged.padded_batch(6, {"image": [4], "label": []})


class AsInPyTorch:
    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        return X[index], int(Y[index])


class AsHuggingFace:
    """With `.with_format("numpy")`."""

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        return {"image": X[index], "label": Y[index]}

    def __getitems__(self, indices):
        return [self[index] for index in indices]


class InBatches(keras.utils.PyDataset):
    def __len__(self):
        return -(-ROWS // 7)

    def __getitem__(self, number):
        return X[7 * number :][:7], Y[7 * number :][:7]


FIRST_ATTEMPTS = {
    "interleave, map, shuffle, batch, repeat": interleaved,
    "from_generator, padded_batch": padded,
    "a class as in PyTorch": AsInPyTorch,
    "a class as of Hugging Face": AsHuggingFace,
    "a PyDataset": InBatches,
    "a generator function": lambda: lambda: zip(X, Y, strict=True),
}


@pytest.mark.parametrize("attempt", FIRST_ATTEMPTS)
def test_what_people_have_trains_on_the_first_attempt(attempt):
    data, strategy = FIRST_ATTEMPTS[attempt](), make_strategy("mirrored", 2)
    trainer = make_trainer(data, strategy, eval_data=(X, Y))
    before = trainer.evaluate()["loss"]
    trainer.train(20, progress=False)
    assert trainer.evaluate()["loss"] < before
