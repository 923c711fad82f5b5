"""`ddl.fit` and `predict` on two workers: the same outputs, the same step, the same end."""

import numpy as np
import pytest

from tests.distribution.whole_clusters import addresses, finish_all, start_worker

# Prints on each worker how it ends what follows. The evaluations get losses from a list.
FITS = """
import os, signal, sys, threading, time
import keras, numpy as np
import ddl
from ddl.distribution.multi_worker import leaving
from ddl.distribution.strategies import build_strategy
from ddl.distribution.workers import Workers
from ddl.training.actions import EachLoop

x = np.random.default_rng(0).normal(size=(22, 3))
data = {"image": x, "label": np.arange(22) % 2}

class FromList:
    losses = dict.fromkeys(range(2, 100, 2), 1.0)
    def __init__(self, trainer):
        self.own = trainer._parts.evaluation.run
        object.__setattr__(trainer._parts.evaluation, "run", self)
    def __call__(self, state):
        return {**self.own(state), "loss": self.losses[int(state.step)]}

with leaving():
    strategy = build_strategy("auto")
    index = Workers(strategy).index
    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        trainer = ddl.Trainer(
            ddl.Classification(model), keras.optimizers.SGD(0.1), data, eval_data=data,
            global_batch_size=8, steps_per_loop=1,
        )
    FromList(trainer)

    def ended(what, steps, at=-1, act=None, **arguments):
        def acts(step):
            if step == at and act is not None:
                act()
        try:
            ddl.fit(trainer, sys.argv[1], train_steps=steps, eval_every=2, progress=False,
                    actions=[EachLoop(acts)], **arguments)
            how = "returned"
        except BaseException as error:
            how = type(error).__name__
        print(what, how, trainer.step, flush=True)

    def signalled(number):
        # To this thread, and until the request is there: it might come in the next step.
        signal.pthread_kill(threading.get_ident(), number)
        until = time.monotonic() + 10
        while not trainer._runner.stop._read().numpy() and time.monotonic() < until:
            time.sleep(0.01)

    def on(worker, function):
        return function if index == worker else None

    ended("request", 4, 1, on(1, trainer.request_stop))
    ended("SIGTERM", 4, 3, on(1, lambda: signalled(signal.SIGTERM)))
    ended("SIGINT", 6, 5, on(0, lambda: signalled(signal.SIGINT)))
    early = ddl.EarlyStopping(patience=4)
    ended("early", 40, 10, on(1, lambda: signalled(signal.SIGTERM)), early_stopping=early)
    ended("again", 40, early_stopping=early)
    found = trainer.predict(x)
    kernel, bias = (v.numpy() for v in model.variables)
    print("predict", found.shape, np.abs(found - (x @ kernel + bias)).max() < 1e-12, found.sum())
os._exit(0)
"""


@pytest.mark.slow
def test_two_workers_end_alike_and_predict_the_same(tmp_path):
    """Also where one of them is signalled at the step at which the run ends early."""
    hosts = addresses(2)
    program = ("-c", FITS, str(tmp_path / "run"))
    ended = finish_all([start_worker(index, hosts, program=program) for index in (0, 1)])
    told = []
    for status, output in ended:
        assert status == 0, output
        told.append([line.split() for line in output.splitlines()][-6:])
    assert [line[:3] for line in told[0][:5]] == [
        ["request", "returned", "1"],
        ["SIGTERM", "TrainingInterrupted", "3"],
        ["SIGINT", "KeyboardInterrupt", "5"],
        ["early", "TrainingInterrupted", "10"],
        ["again", "returned", "10"],
    ], ended
    # The worker that got no signal raises TrainingInterrupted.
    assert told[1][2] == ["SIGINT", "TrainingInterrupted", "5"], ended
    assert told[1][:2] + told[1][3:5] == told[0][:2] + told[0][3:5], ended
    for line in told:
        assert line[5][:4] == ["predict", "(22,", "2)", "True"], ended
    assert np.isclose(*(float(line[5][4]) for line in told), rtol=0, atol=0)
