"""Training from each kind of data: the same on any devices, and after a resume in an epoch."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.checkpoints.checkpoints import Checkpoints
from tests.conftest import make_strategy, save
from tests.data.kinds import KINDS, ROWS, SAVED, UPDATES, X, Y, ends_of, make_trainer
from tests.distribution.whole_clusters import finish_all, free_addresses, start_worker


@functools.cache
def on_one_device(kind, folder):
    """Weights after the last update; saves in the second epoch."""
    trainer = make_trainer(KINDS[kind](folder), make_strategy("one_device", 1))
    trainer.train(SAVED, progress=False)
    save(folder / kind, trainer)
    return ends_of(trainer, UPDATES - SAVED)


CASES = [*((kind, 4, 1) for kind in KINDS), ("readers", 2, 2)]


@pytest.mark.parametrize(("kind", "replicas", "microbatches"), CASES)
def test_replicas_with_microbatches_end_as_one_device(kind, replicas, microbatches, folder):
    strategy = make_strategy("mirrored", replicas)
    trainer = make_trainer(KINDS[kind](folder), strategy, accumulation_steps=microbatches)
    for one, other in zip(ends_of(trainer), on_one_device(kind, folder), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-10)


@pytest.mark.processes
def test_two_workers_that_resume_in_an_epoch_end_as_one_device(folder):
    """All kinds of data, from the checkpoints of one process."""
    wanted = {kind: on_one_device(kind, folder) for kind in KINDS}
    addresses, program = free_addresses(2), ("-m", "tests.data.worker", str(folder))
    ended = finish_all([start_worker(n, addresses, program=program) for n in range(2)], 120)
    assert [status for status, _ in ended] == [0, 0], ended
    for kind in KINDS:
        with np.load(folder / f"{kind}.npz") as found:
            for one, other in zip(found.values(), wanted[kind], strict=True):
                np.testing.assert_allclose(one, other, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_resumes_in_an_epoch_ends_with_the_same_bits(kind, folder):
    wanted = on_one_device(kind, folder)
    trainer = make_trainer(KINDS[kind](folder), make_strategy("one_device", 1))
    Checkpoints(folder / kind, trainer).restore_latest()
    assert trainer.step == SAVED
    for one, other in zip(ends_of(trainer, UPDATES - SAVED), wanted, strict=True):
        np.testing.assert_array_equal(one, other)


# What people have, and what they write on their first attempt.
def interleaved():
    parts = tf.data.Dataset.range(4).interleave(lambda n: tf.data.Dataset.range(n, ROWS, 4), 2)
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
    __call__ = None  # as of a class that can be called, too

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        assert type(index) is int
        return X[index], int(Y[index])


class AsHuggingFace(AsInPyTorch):
    """With `.with_format("numpy")`; and as `tfds.data_source` returns it."""

    def __getitems__(self, indices):
        return [{"image": X[index], "label": Y[index]} for index in indices]


class InBatches(keras.utils.PyDataset):
    def __len__(self):
        return -(-ROWS // 7)

    def __getitem__(self, number):
        return X[7 * number :][:7], Y[7 * number :][:7]


FIRST_ATTEMPTS = {
    "batch, repeat": lambda: tf.data.Dataset.from_tensor_slices((X, Y)).batch(32).repeat(),
    "interleave, map, shuffle, batch, repeat": interleaved,
    "from_generator, padded_batch": padded,
    "a class as in PyTorch": AsInPyTorch,
    "a data set as of Hugging Face and TFDS": AsHuggingFace,
    "a PyDataset": InBatches,
    "a generator function": lambda: lambda: zip(X, Y, strict=True),
}


@pytest.mark.parametrize("attempt", FIRST_ATTEMPTS)
def test_what_people_have_trains_on_the_first_attempt(attempt):
    data, strategy = FIRST_ATTEMPTS[attempt](), make_strategy("mirrored", 2)
    trainer = make_trainer(data, strategy)
    first, last = (trainer.train(10, progress=False)["loss"] for _ in range(2))
    assert last < first


class OfTwoSources:
    def __init__(self):
        self.model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])

    def per_example(self, features, training):
        return ddl.PerExample(self.model(features["input"])[:, 0] ** 2)

    def step(self, update, batch):
        update.minimize(self.per_example, batch["one"])
        update.minimize(self.per_example, batch["other"], name="other")


def test_sources_of_one_length_have_orders_of_their_own():
    data, strategy = {"one": (X, Y), "other": (X, Y)}, make_strategy("one_device", 1)
    with strategy.scope():
        trainer = ddl.Trainer(OfTwoSources(), "sgd", data, global_batch_size=7)
    one, other = (each.table(strategy, 0, 3)["index"] for each in trainer.pipelines.values())
    assert sorted(one.ravel()) == sorted(other.ravel()) == list(range(ROWS))
    assert not np.array_equal(one, other)


def test_memory_maps_train_as_arrays_with_nan_where_a_mask_is(tmp_path):
    images = np.where(np.arange(4) < 1 + Y[:, np.newaxis], X, np.nan)
    np.save(tmp_path / "image.npy", images)
    ends = []
    for image in (images, np.load(tmp_path / "image.npy", mmap_mode="r")):
        data = {"image": image, "label": Y}
        ends.append(ends_of(make_trainer(data, make_strategy("one_device", 1))))
    for one, other in zip(*ends, strict=True):
        np.testing.assert_array_equal(one, other)
        assert np.isfinite(one).all()
