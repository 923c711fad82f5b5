"""The GPU's path of batches, arrays and gradients, run on virtual CPU devices."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.data import BatchPipeline
from ddl.training.loop import RowTables
from tests.conftest import LikeGpus, make_strategy, save
from tests.step.test_step_graph import operations, trainer
from tests.training.parity_cases import (
    CASES,
    COMBINED,
    assert_small,
    differences,
    make_trainer,
)
from tests.training.test_trainer import all_copies, check_that_overflows_change_nothing

RICH, SPARSE, NOISY = COMBINED
PADDED = "131 examples in batches of 32"

pytestmark = pytest.mark.usefixtures("gpu_path")


def strategy_on(replicas: int) -> tf.distribute.Strategy:
    return LikeGpus(replicas) if replicas > 1 else make_strategy("one_device", 1)


def check_parity(replicas: int, name: str) -> None:
    """Checks results, and that streams are distributed and resident examples are not."""
    strategy = strategy_on(replicas)
    assert_small(name, differences(name, strategy, "float64"), 1e-10)
    if replicas > 1:
        assert bool(strategy.distributed) == (name == NOISY)


@pytest.mark.parametrize(
    ("replicas", "name"),
    [(1, PADDED), (2, RICH), (2, NOISY), (2, SPARSE)],
)
def test_parity(replicas, name):
    check_parity(replicas, name)


def test_overflows_change_nothing():
    check_that_overflows_change_nothing(LikeGpus(2), [1])


@pytest.mark.parametrize("resident", [True, False])
def test_resumed_within_an_epoch_to_the_bit(tmp_path, resident):
    """With padding, microbatches and an epoch's end after the resume; the loops' ends differ."""
    case, strategy = CASES[PADDED], LikeGpus(2)
    arguments = {"data_on_device": resident, "accumulation_steps": 2, "steps_per_loop": 10}
    trainer = make_trainer(case, strategy, "float32", **arguments)
    trainer.train(3)
    save(tmp_path, trainer)
    trainer.train(2)
    trainer.train(4)
    resumed = make_trainer(case, strategy, "float32", **arguments)
    ddl.Checkpoints(tmp_path, resumed).restore_latest()
    resumed.train(6)
    for ours, theirs in zip(all_copies(resumed), all_copies(trainer), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_stream_without_a_strategy():
    """A script that builds a Trainer with nothing else, on a machine with a GPU."""
    x = np.random.default_rng(0).normal(size=(20, 3))
    found = []
    for resident in (True, False):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        data, where = (x, np.arange(20) % 2), {"data_on_device": resident}
        made = ddl.Trainer(ddl.Classification(model), "sgd", data, global_batch_size=8, **where)
        made.train(3)
        found.append(made.predict(x))
    np.testing.assert_array_equal(*found)


def test_each_replicas_rows_lie_on_its_device():
    """The rows of a distributed iterator, resident arrays, and the order of resident examples."""
    replicas = 2
    strategy = LikeGpus(replicas)
    data = {"x": np.arange(40, dtype=np.int32)}
    stream = BatchPipeline(ddl.data.Source(data), 8, resident=False)
    resident = BatchPipeline(ddl.data.Source(data), 8, resident=True)
    iterator = stream.iterator(strategy)
    assert isinstance(iterator, tf.distribute.DistributedIterator)
    _, tables = RowTables({"": resident}, strategy).at(0)
    arrays = resident.resident_arrays(strategy)["x"]
    for value in (next(iterator)["x"], tables[""]["index"], arrays):
        parts = strategy.experimental_local_results(value)
        assert [part.device[-5:] for part in parts] == [f"CPU:{i}" for i in range(replicas)]
    assert {part.dtype for part in strategy.experimental_local_results(arrays)} == {tf.int64}


def test_no_tuner_runs_over_a_distributed_data_set():
    """Closing an iterator waits for a tuner's thread, up to a minute."""
    strategy = LikeGpus(2)
    iterator = BatchPipeline(ddl.data.Source(dict(x=np.arange(8))), 4, resident=False).iterator(
        strategy
    )
    (given,) = strategy.distributed
    assert given.options().autotune.enabled is False
    for own in iterator._iterators:
        assert own._dataset.options().autotune.enabled is False


def test_an_update_takes_its_rows_from_an_order_that_is_already_there():
    """It computes none, and waits for no thread; the row of the order is a slice."""
    counts, _ = operations(trainer(LikeGpus(2)))
    assert not {"RandomIndexShuffle", "TopKV2", "IteratorGetNext"} & counts.keys()
    assert counts["GatherV2"] == 2 * 2  # images and labels on each replica
