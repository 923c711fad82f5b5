"""Twenty interrupts of `ddl.fit` at random moments: it ends with the bits of a straight run."""

import collections
import os
import signal
import threading
import time

import keras
import numpy as np
import pytest

import ddl
from ddl.training.loop import TrainingLoop
from tests.conftest import make_strategy
from tests.run.whole_runs import lines

MOMENTS = ("tracing", "training", "evaluating", "saving")
INTERRUPTS = 20
STEPS = 300
PERIODS = {"eval_every": 4, "checkpoint_every": 5, "log_every": 10}
RANDOM = np.random.default_rng(0)
IMAGES = RANDOM.normal(size=(40, 3)).astype("f4")
DATA = {"image": IMAGES, "label": (IMAGES.sum(1) > 0).astype("i4")}


class Moments:
    """Sends SIGINT at a random moment within a call of the function of a wanted moment.

    Attributes:
      wanted: The moment of the next interrupt; None for none.
      hits: Number of interrupts sent, by moment. Each was sent before its function returned.
    """

    def __init__(self, monkeypatch):
        self.wanted = None
        self.hits = collections.Counter()
        self._random = np.random.default_rng(1)
        self._seconds = dict.fromkeys(MOMENTS, 0.001)
        for moment, owner, name in (
            ("tracing", ddl.Trainer, "trace"),
            ("training", TrainingLoop, "run"),
            ("evaluating", ddl.Trainer, "evaluate"),
            ("saving", ddl.Checkpoints, "save"),
        ):
            monkeypatch.setattr(owner, name, self._interrupting(moment, getattr(owner, name)))

    def _interrupting(self, moment, function):
        def call(*arguments, **options):
            only_call = moment == "tracing"
            if moment != self.wanted or (not only_call and self._random.random() < 0.5):
                began = time.monotonic()
                result = function(*arguments, **options)
                self._seconds[moment] = time.monotonic() - began
                return result
            delay, ended = self._random.uniform(0, 0.8) * self._seconds[moment], threading.Event()

            def interrupt():
                if not ended.wait(delay) or only_call:
                    self.wanted = None
                    self.hits[moment] += 1
                    os.kill(os.getpid(), signal.SIGINT)

            thread = threading.Thread(target=interrupt)
            thread.start()
            try:
                return function(*arguments, **options)
            finally:
                ended.set()
                thread.join()

        return call


@pytest.fixture
def moments(monkeypatch):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield Moments(monkeypatch)
    signal.signal(signal.SIGINT, before)


def make_trainer():
    keras.utils.set_random_seed(3)
    with make_strategy("one_device", 1).scope():
        layers = [ddl.layers.Dropout(0.3), keras.layers.Dense(2)]
        return ddl.Trainer(
            ddl.Classification(keras.Sequential([keras.Input((3,)), *layers])),
            keras.optimizers.Adam(0.01),
            DATA,
            eval_data=DATA,
            global_batch_size=8,
            weight_average=ddl.ExponentialMovingAverage(0.9),
        )


def fit(trainer, folder):
    ddl.fit(trainer, folder, train_steps=STEPS, progress=False, **PERIODS)


def values(trainer):
    variables = [*trainer.model.variables, *trainer.optimizer.variables]
    return [v.numpy() for v in [*variables, *trainer.averages.variables]]


def test_twenty_interrupts_leave_no_trace(moments, tmp_path):
    """Each trace is that of a new trainer, as after a restart of a notebook's kernel."""
    straight = trainer = make_trainer()
    fit(straight, tmp_path / "straight")
    folder = tmp_path / "run"
    order = np.random.default_rng(2).permutation(MOMENTS * (INTERRUPTS // len(MOMENTS)))
    order = ["tracing", *np.delete(order, list(order).index("tracing"))]
    for number, moment in enumerate(order, 1):
        if moment == "tracing":
            trainer = make_trainer()
        moments.wanted = moment
        with pytest.raises(KeyboardInterrupt):
            fit(trainer, folder)
        assert moments.hits.total() == number
        assert trainer.step == int(trainer.optimizer.iterations.numpy())
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert moments.hits == dict.fromkeys(MOMENTS, INTERRUPTS // len(MOMENTS))
    assert trainer.step < STEPS
    fit(trainer, folder)
    assert trainer.step == int(trainer.optimizer.iterations.numpy()) == STEPS
    for one, other in zip(values(trainer), values(straight), strict=True):
        np.testing.assert_array_equal(one, other)
    assert lines(folder) == lines(tmp_path / "straight")
