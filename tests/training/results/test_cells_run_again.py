"""Cells that are run again: several trainers in one process."""

import gc
import logging
import resource
import sys
import weakref
from pathlib import Path

import keras
import numpy as np
import pytest

import ddl
from ddl.training.results import earlier
from tests.conftest import make_strategy
from tests.processes import forked
from tests.run.whole_runs import ROOT

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


def test_five_times_without_a_warning(tmp_path, caplog):
    """TensorFlow warns from the fifth trace of one function on."""
    strategy = make_strategy("one_device", 1)
    with caplog.at_level(logging.WARNING):
        found = [run_cells(tmp_path / str(n), strategy).step for n in range(5)]
    assert found == [2] * 5
    assert not [record.getMessage() for record in caplog.records]


def test_the_arrays_of_an_unused_trainer_are_freed(tmp_path, monkeypatch):
    monkeypatch.setattr(earlier, "_LIMIT", 100)
    strategy = make_strategy("one_device", 1)
    gc.collect()
    enable = gc.enable
    gc.disable()
    # A reader thread of an earlier test's data may end in between (ddl.data.locking).
    monkeypatch.setattr(gc, "enable", lambda: None)
    try:
        unused = weakref.ref(run_cells(tmp_path / "first", strategy))
        run_cells(tmp_path / "second", strategy)
        assert unused() is None
    finally:
        enable()


def memory_of_trainers(number):
    """Makes trainers of 64 MB of arrays; prints the resident memory before them and after each."""

    def show_memory():
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        print("memory", pages * resource.getpagesize() >> 20)

    strategy = make_strategy("one_device", 1)
    show_memory()
    for _ in range(number):
        images = np.ones([1 << 18, 64], "f4")
        with strategy.scope():
            model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(2)])
            trainer = ddl.Trainer(
                ddl.Classification(model),
                keras.optimizers.SGD(0.1),
                {"image": images, "label": np.zeros(1 << 18, "i4")},
                global_batch_size=8,
            )
        trainer.train(1)
        show_memory()


@pytest.mark.processes
def test_five_trainers_take_the_memory_of_two_at_most():
    """A new process: the memory of this one depends on the tests before."""
    program = ["-m", "tests.training.results.test_cells_run_again"]
    done = forked.run(
        [sys.executable, *program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    memory = [int(line.split()[1]) for line in done.stdout.splitlines() if "memory" in line]
    assert len(memory) == 6
    # Each trainer has the arrays of the caller and its own copy.
    before, one = memory[0], memory[1] - memory[0]
    assert max(memory) - before < 2.25 * one, memory


if __name__ == "__main__":
    gc.disable()  # whether Python collects in between is chance
    memory_of_trainers(5)
