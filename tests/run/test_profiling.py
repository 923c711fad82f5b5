"""Profiles of a run: by steps, and what goes wrong."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.errors import ConfigError
from ddl.precision import set_precision
from ddl.run import profiling
from ddl.training.actions import EachLoop
from tests.run.whole_runs import lines

DATA = {
    "image": np.random.default_rng(0).normal(size=(64, 4)).astype("f4"),
    "label": np.arange(64) % 3,
}


class Breaking(ddl.Classification):
    def per_example(self, features, training):
        found = super().per_example(features, training)
        is_seven = tf.reduce_all(features["image"] == 7, axis=1)
        return ddl.PerExample(tf.where(is_seven, np.nan, found.loss), found.metrics)


@pytest.fixture(scope="module")
def make():
    def make(data=DATA, steps_per_loop=7, task=ddl.Classification, **arguments):
        set_precision("float32")
        keras.utils.set_random_seed(1)
        model = ddl.models.mlp((4,), 3, hidden_units=(4,))
        arguments |= {"global_batch_size": 16, "steps_per_loop": steps_per_loop}
        return ddl.Trainer(task(model), keras.optimizers.SGD(0.1), data, **arguments)

    return make


def profiles(folder):
    return sorted(folder.rglob("*.xplane.pb"))


def test_steps_are_profiled_and_results_are_the_same(make, tmp_path, capsys):
    ends, counted = [], []

    def note(step):
        ends.append(step)
        counted.append(trainer.pace.counts)

    trainer = make()
    ddl.fit(
        trainer,
        tmp_path / "run",
        train_steps=60,
        profile=(9, 12),
        actions=[EachLoop(note)],
        log_every=10,
    )
    assert {9, 12} <= {*ends}
    # The ends of loops in which the profiler ran.
    assert [e for e, c in zip(ends, counted, strict=True) if not c] == [
        e for e in ends if 9 < e < 12
    ]
    files = profiles(tmp_path / "run" / "profile")
    assert [file.relative_to(tmp_path / "run").parts[1] for file in files] == [
        "after-step-9",
    ]
    assert all(b"TraceMe" in f.read_bytes() or f.stat().st_size > 1000 for f in files)
    shown = capsys.readouterr().out
    assert "The profile of steps 9 to 12 is in" in shown

    straight = make()
    ddl.fit(straight, tmp_path / "straight", train_steps=60, log_every=10)
    for one, two in zip(trainer.model.weights, straight.model.weights, strict=True):
        np.testing.assert_array_equal(one.numpy(), two.numpy())
    assert lines(tmp_path / "run") == lines(tmp_path / "straight")


def test_a_profile_that_cannot_be_made_does_not_end_the_run(make, tmp_path, capsys, monkeypatch):
    def fails(*_):
        raise tf.errors.UnavailableError(None, None, "Another profiler is running.")

    monkeypatch.setattr(profiling.tf.profiler.experimental, "start", fails)
    trainer = make()
    ddl.fit(trainer, tmp_path, train_steps=6, profile=(2, 4))
    assert trainer.step == 6
    assert "There is no profile: Another profiler is running." in capsys.readouterr().out


def test_steps_that_an_earlier_call_made_are_named(make, tmp_path, capsys, monkeypatch):
    profiler = profiling.tf.profiler.experimental
    begun = []
    monkeypatch.setattr(profiler, "start", lambda folder, _: begun.append(folder[-1]))
    monkeypatch.setattr(profiler, "stop", lambda: None)
    trainer = make()
    ddl.fit(trainer, tmp_path, train_steps=3)
    for end, profile in ((4, (0, 3)), (6, (2, 5))):
        ddl.fit(trainer, tmp_path, train_steps=end, profile=profile)
    shown = capsys.readouterr().out
    assert "no profile of steps 0 to 3, since the run continues from step 3. Pass steps" in shown
    assert "profile begins after step 4, from which the run continues, not after step 2" in shown
    assert begun == ["4"]


def test_a_rewind_ends_the_profile(make, tmp_path, capsys, monkeypatch):
    calls = []
    profiler = profiling.tf.profiler.experimental
    monkeypatch.setattr(profiler, "start", lambda folder, _: calls.append(folder[-1]))
    monkeypatch.setattr(profiler, "stop", lambda: calls.append("stop"))
    images = DATA["image"].copy()
    images[20] = 7  # in the second batch
    data = {**DATA, "image": images}
    trainer = make(data, steps_per_loop=1, task=Breaking, shuffle=False)
    arguments = {"train_steps": 4, "checkpoint_every": 1, "on_divergence": "rewind"}
    ddl.fit(trainer, tmp_path, profile=(1, 3), **arguments)
    assert "The run rewinds to step 1" in capsys.readouterr().out
    assert calls == ["1", "stop", "1", "stop"]


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ((4, 4), r"the smaller one first, such as \(100, 110\).*got \(4, 4\)"),
        ("4:5", "got '4:5'"),
        ((0, 1.5), r"got \(0, 1.5\)"),
        ((2, 7), "profile=2:7 ends after the run, which has 6 steps"),
    ],
)
def test_steps_that_are_no_range_of_the_run(make, tmp_path, steps, message):
    with pytest.raises(ConfigError, match=message):
        ddl.fit(make(), tmp_path, train_steps=6, profile=steps)
    assert not list(tmp_path.iterdir())


def test_a_profile_needs_a_directory(make):
    with pytest.raises(ConfigError, match="profile needs a place to write to"):
        ddl.fit(make(), train_steps=6, profile=(2, 4))
