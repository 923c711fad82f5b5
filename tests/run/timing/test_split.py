"""The split of log periods: the arithmetic here, and the sources of whole runs."""

import json
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.callbacks import Every
from ddl.data import ArraySource, StreamSource
from ddl.precision import set_precision
from ddl.run.timing.split import PeriodSplit, is_input_bound, split_off
from tests.run.whole_runs import lines

STEPS, PAUSE = 60, 0.03


class FakeWorkers:
    """Workers of which the others gave these rows."""

    def __init__(self, *others):
        self.number = len(others) + 1
        self._others = others

    def gather(self, row):
        return np.array([row, *self._others])


def test_seconds_of_input_are_taken_from_the_loop():
    assert split_off({"loop": 3.0, "saving": 1.0}, 2.0) == {
        "loop": 1.0,
        "saving": 1.0,
        "input": 2.0,
    }
    assert split_off({"loop": 3.0}, 3.5) == {"loop": 0.0, "input": 3.0}
    assert split_off({"loop": 3.0}, None) == {"loop": 3.0}
    assert split_off({}, 0.0) == {"loop": 0.0, "input": 0.0}


@pytest.mark.parametrize(
    ("waited", "loop", "bound"), [(0.0, 0.0, False), (1.9, 8.1, False), (2.0, 8.0, True)]
)
def test_the_share_from_which_a_run_is_input_bound(waited, loop, bound):
    assert is_input_bound(waited, loop) == bound


def test_periods_and_their_shares():
    now, reported = {"start_up": 5.0, "tracing": 1.0}, []
    split = PeriodSplit(lambda: dict(now), FakeWorkers(), 0, reported.append)
    now |= {"start_up": 5.5, "tracing": 3.0, "loop": 1.0, "input": 0.25, "saving": 0.25}
    assert split.figures(10) == {
        **{"time/loop": 1.0, "time/input": 0.25, "time/tracing": 2.0, "time/saving": 0.25},
        **{"time/between": 0.5, "time_share/loop": 0.25, "time_share/input": 0.0625},
        **{"time_share/tracing": 0.5, "time_share/saving": 0.0625, "time_share/between": 0.125},
    }
    assert len(reported) == 1  # a fifth of 1.25 s
    now |= {"loop": 3.0}
    found = split.figures(20)
    assert found["time/input"] == 0.0  # known to be nothing, unlike the kinds that are left out
    assert "time/saving" not in found
    del now["input"]
    assert "time/input" not in split.figures(30)  # unknown


def test_a_second_of_the_loop_is_judged_at_once():
    now, reported = {"loop": 0.0, "input": 0.0}, []
    split = PeriodSplit(lambda: dict(now), FakeWorkers(), 5, reported.append)
    for number in range(1, 4):
        now |= {"loop": 0.2 * number, "input": 0.2 * number}
        split.figures(10 * number)
        assert len(reported) == (number == 3)
    assert reported == [
        "The run is input-bound: since step 5 the training loop has waited for input for 0.6 s of "
        "1.2 s (50%). Faster data would make it faster: docs/profiling.md lists what helps."
    ]
    now |= {"loop": 10.0, "input": 10.0}
    split.figures(40)
    assert len(reported) == 1


def test_the_slowest_of_several_workers():
    now, reported = {"loop": 0.0, "input": 0.0, "workers": 0.0}, []
    # Own seconds, those of the period, of input and of the loop.
    others = [0.5, 10.0, 0.1, 9.0], [6.0, 10.0, 5.5, 4.0]
    split = PeriodSplit(lambda: dict(now), FakeWorkers(*others), 0, reported.append)
    now |= {"loop": 8.0, "input": 0.5, "workers": 1.5}
    assert split.figures(10)["slowest_worker"] == 2
    assert reported == [
        "Worker 2 holds up the others: in the last 10.0 s it spent 6.0 s on input, or outside of "
        "the training loop, and the other workers 0.5 s.",
        # The waits of worker 2, who waits longest.
        "The run is input-bound: since step 0 the training loop has waited for input for 5.5 s of "
        "9.5 s (58%). Faster data would make it faster: docs/profiling.md lists what helps.",
    ]
    now |= {"loop": 16.0}
    split.figures(20)
    assert len(reported) == 2


IMAGES = np.random.default_rng(0).normal(size=(64, 4)).astype("f4")
DATA = {"image": IMAGES, "label": np.arange(64) % 3}


class SlowStep(ddl.Classification):
    def per_example(self, features, training):
        found = super().per_example(features, training)
        with tf.control_dependencies([_sleep()]):
            return ddl.PerExample(tf.identity(found.loss), found.metrics)


def _sleep():
    return tf.numpy_function(lambda: time.sleep(PAUSE) or np.float32(0), [], tf.float32)


def slow():
    def read():
        for number in range(64):
            time.sleep(PAUSE / 4)
            yield {name: rows[number] for name, rows in DATA.items()}

    spec = {name: tf.TensorSpec(rows.shape[1:], rows.dtype) for name, rows in DATA.items()}
    data = tf.data.Dataset.from_generator(read, output_signature=spec)
    return StreamSource(data, num_examples=64, shuffle_buffer=1)


def make(data, task=ddl.Classification, **arguments):
    set_precision("float32")
    keras.utils.set_random_seed(1)
    model = ddl.models.mlp((4,), 3, hidden_units=(4,))
    return ddl.Trainer(
        task(model),
        keras.optimizers.SGD(0.1),
        data,
        global_batch_size=4,
        **{"data_on_device": False, "steps_per_loop": 10, **arguments},
    )


def run(folder, *arguments, **options):
    trainer = make(*arguments, **options)
    ddl.fit(trainer, folder, train_steps=STEPS, log_every=20, checkpoint_every=20)
    return trainer


def of_lines(folder, name):
    text = (folder / "metrics.jsonl").read_text()
    return [json.loads(line).get(name) for line in text.splitlines()]


def test_a_slow_source_is_called_input_bound(tmp_path, capsys):
    trainer = make(slow())
    trainer.train(10)
    assert trainer.seconds_of_input == 0  # the first call of the loop counts as tracing
    ddl.fit(trainer, tmp_path, train_steps=STEPS, log_every=20)
    assert "The run is input-bound: since step" in capsys.readouterr().out
    assert all(share > 0.5 for share in of_lines(tmp_path, "time_share/input")[1:])


@pytest.mark.parametrize("on_device", [False, True])
def test_a_fast_source_is_not(tmp_path, capsys, on_device):
    run(tmp_path, DATA, SlowStep, data_on_device=on_device)
    assert "input-bound" not in capsys.readouterr().out
    waited = of_lines(tmp_path, "time/input")
    assert all(seconds == 0 if on_device else seconds > 0 for seconds in waited[1:])
    assert all(share < 0.1 for share in of_lines(tmp_path, "time_share/input")[1:])
    assert all(share > 0.5 for share in of_lines(tmp_path, "time_share/loop")[1:])


def test_the_shares_are_written_and_neither_printed_nor_in_the_history(tmp_path, capsys):
    def pause(moment):
        time.sleep(1)

    trainer = make(DATA, eval_data=DATA, steps_per_loop=None)
    plan = {"log_every": 5, "checkpoint_every": 5, "eval_every": 5}
    ddl.fit(trainer, tmp_path, train_steps=10, callbacks=[Every(5, pause)], **plan)
    shown = capsys.readouterr().out
    assert "time" not in "".join(x for x in shown.splitlines() if x.startswith("step "))
    assert not [name for name in trainer.history.figures() if name.startswith("time")]
    first, second = (x for x in read(tmp_path) if x["split"] == "train")
    # The line of a step is written before its evaluation, callbacks and checkpoint.
    assert {"time/tracing", "time/loop", "time/input", "process_memory_mib"} <= first.keys()
    assert {"time/evaluation", "time/callbacks", "time/saving"} <= second.keys() - first.keys()
    assert second["time/callbacks"] >= 1
    assert sum(v for k, v in second.items() if k.startswith("time_share/")) == pytest.approx(
        1, abs=1e-4
    )
    assert first["process_memory_mib"] > 100
    tags = {
        value.tag
        for file in (tmp_path / "train").iterdir()
        for event in tf.compat.v1.train.summary_iterator(str(file))
        for value in event.summary.value
    }
    assert {"time/loop", "time_share/input", "process_memory_mib"} <= tags
    ddl.fit(trainer, tmp_path, train_steps=15, **plan)
    trainer.history.drop_after(0)
    ddl.fit(trainer, tmp_path, train_steps=20, **plan)  # fills the history from metrics.jsonl
    assert len(trainer.history) > 4
    assert not [name for name in trainer.history.figures() if name.startswith("time")]


def read(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_measuring_changes_no_result(tmp_path, monkeypatch):
    measured = run(tmp_path / "measured", ArraySource(**DATA))
    monkeypatch.setattr("ddl.training.loop.training_loop.InputWait", lambda: None)
    plain = run(tmp_path / "plain", ArraySource(**DATA))
    assert measured.seconds_of_input > 0
    assert plain.seconds_of_input is None
    assert "time/input" not in read(tmp_path / "plain")[-1]
    for one, two in zip(measured.model.weights, plain.model.weights, strict=True):
        np.testing.assert_array_equal(one.numpy(), two.numpy())
    assert lines(tmp_path / "measured") == lines(tmp_path / "plain")
