"""Cells that are run again: several trainers in one process."""

import gc
import logging
import weakref

import keras
import numpy as np
import pytest

import ddl
from ddl.training.results import earlier
from tests.conftest import make_strategy

DATA = {"image": np.ones([8, 3], "f4"), "label": np.arange(8) % 2}


def run_cells(folder, strategy):
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        average = ddl.ExponentialMovingAverage(0.5)
        trainer = ddl.Trainer(
            ddl.Classification(model),
            keras.optimizers.SGD(0.1),
            DATA,
            eval_data=DATA,
            global_batch_size=8,
            weight_average=average,
        )
    ddl.fit(trainer, folder, train_steps=2, progress=False)
    trainer.evaluate(DATA)
    trainer.predict(DATA["image"])
    return trainer


def test_six_times_without_a_warning(tmp_path, caplog):
    """TensorFlow warns from the fifth trace of one function on."""
    strategy = make_strategy("one_device", 1)
    with caplog.at_level(logging.WARNING):
        found = [run_cells(tmp_path / str(n), strategy).step for n in range(6)]
    assert found == [2] * 6
    assert not [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(("limit", "freed"), [(100, True), (1 << 20, False)])
def test_the_arrays_of_an_unused_trainer_are_freed(tmp_path, monkeypatch, limit, freed):
    monkeypatch.setattr(earlier, "_LIMIT", limit)
    strategy = make_strategy("one_device", 1)
    gc.collect()
    gc.disable()
    try:
        unused = weakref.ref(run_cells(tmp_path / "first", strategy))
        run_cells(tmp_path / "second", strategy)
        assert (unused() is None) == freed
    finally:
        gc.enable()
