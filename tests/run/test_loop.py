"""Rewinds after a divergence, and stops; whole runs are in run/test_train.py."""

import functools
import json
import os
import signal
import time
from contextlib import contextmanager

import keras
import numpy as np
import pytest

import ddl
from ddl.checkpoints.checkpoints import Checkpoints
from ddl.checkpoints.directory import CheckpointDirectory
from ddl.checkpoints.retention import Retention
from ddl.distribution.workers import Workers
from ddl.errors import ModelDirectoryError, TrainingDiverged, TrainingInterrupted
from ddl.precision import set_precision
from ddl.run.console import RunConsole
from ddl.run.loop import OuterLoop
from ddl.run.plan import RunPlan
from ddl.run.writers import JsonLinesWriter, Writers
from ddl.signals import StopSignals
from ddl.training.pace import Pace
from tests.conftest import make_strategy
from tests.training.rewinding import Start

STEPS = 20


def poisoned(*batches):
    """Examples in order, one of each of these batches beyond what float32 can square."""
    images = np.random.default_rng(0).normal(size=(8 * STEPS * 2, 4)).astype("f4")
    for batch in batches:
        images[8 * batch + 3] = 1e30
    return {"image": images, "label": np.arange(len(images)) % 2}


def make_trainer(data, replicas=2, **arguments):
    set_precision("float32")
    keras.utils.set_random_seed(0)
    strategy = make_strategy("mirrored", replicas)
    with strategy.scope():
        square = keras.layers.Lambda(lambda x: x + x * x * 1e-3)
        model = keras.Sequential([keras.Input((4,)), square, keras.layers.Dense(2, name="out")])
        return ddl.Trainer(
            ddl.Classification(model),
            keras.optimizers.SGD(0.01, momentum=0.9),
            data,
            eval_data={name: value[:8] for name, value in poisoned().items()},
            global_batch_size=8,
            shuffle=False,
            **arguments,
        )


@functools.cache
def _start(*batches) -> Start:
    return Start(make_trainer(poisoned(*batches)))


def made_again(*batches, steps_per_loop=None):
    """Returns a trainer on `poisoned(*batches)` at its start.

    All callers with these batches share the trainer, which is traced once.
    """
    set_precision("float32")
    trainer = _start(*batches).again()
    for patched in (vars(trainer._runner), vars(trainer)):
        patched.pop("run_loop", None)
        patched.pop("evaluate", None)
    trainer._runner._pace = Pace(steps_per_loop)
    return trainer


@functools.cache
def weights_without(first, end):
    """Returns the weights after training on all batches but those from `first` to `end` - 1."""
    data = poisoned()
    keep = np.r_[0 : 8 * first, 8 * end : len(data["label"])]
    straight = make_trainer({name: value[keep] for name, value in data.items()})
    straight.train(STEPS)
    return weights(straight)


def run(folder, trainer, reported=None, **plan):
    """Like ddl.run.train, from here on; returns the trainer at the end."""
    plan = RunPlan(**{"train_steps": STEPS, "log_every": 5, "checkpoint_every": 5, **plan})
    report = (reported if reported is not None else []).append
    console = RunConsole()
    console.line = report
    json_lines = JsonLinesWriter(folder / "metrics.jsonl", report)
    checkpoints = Checkpoints(
        folder / "checkpoints", trainer, plan.retention, report, json_lines.sync
    )
    checkpoints.restore_latest()
    folder.mkdir(exist_ok=True)
    writers = Writers([json_lines, console])
    writers.drop_after(trainer.step)
    with StopSignals(trainer.request_stop) as stop:
        OuterLoop(trainer, plan, checkpoints, writers, console, stop, True).run()
    return trainer


def lines(folder, split="train"):
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in found:
        line.pop("examples_per_second", None)
    return [line for line in found if line["split"] == split]


def weights(trainer):
    return [v.numpy() for v in [*trainer.model.variables, *trainer.optimizer.variables]]


def test_a_divergence_stops_the_run_and_saves_nothing_of_it(tmp_path):
    with pytest.raises(TrainingDiverged, match="step 13: the loss is not finite from batch 12"):
        run(tmp_path, made_again(12))
    assert max(path.name for path in (tmp_path / "checkpoints").glob("*.index")) == "step-5.index"
    assert (tmp_path / "checkpoints" / "step-10.index").exists()
    assert not (tmp_path / "checkpoints" / "step-13.index").exists()


@pytest.mark.parametrize("steps_per_loop", [None, 1, 7])
def test_going_back_leaves_out_the_batches_up_to_the_bad_one(tmp_path, steps_per_loop):
    """It is what a run on the other batches alone would have done, wherever loops end."""
    reported = []
    trainer = made_again(12, steps_per_loop=steps_per_loop)
    run(tmp_path / "run", trainer, reported, on_divergence="rewind")
    assert trainer.step == STEPS
    assert int(trainer.state.rewinds) == 1
    assert trainer.skipped_updates == 0
    assert any("skips the batches 10 to 12. This is rewind 1 of 3" in text for text in reported)
    for ours, theirs in zip(weights(trainer), weights_without(10, 13), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert [line["step"] for line in lines(tmp_path / "run")] == [5, 10, 15, 20]
    assert [line.get("rewinds") for line in lines(tmp_path / "run")] == [None, None, 1, 1]


def test_all_workers_wait_for_the_last_write(tmp_path, monkeypatch):
    written = []

    @contextmanager
    def together(workers):
        yield
        written.append((tmp_path / "checkpoints" / f"step-{STEPS}.index").exists())

    monkeypatch.setattr(Workers, "failing_together", together)
    run(tmp_path, made_again())
    assert written[-1]
    assert not any(written[:-1])  # the restore, and the checks before the first update


def test_going_back_before_there_was_a_checkpoint(tmp_path):
    trainer = made_again(2)
    run(tmp_path, trainer, on_divergence="rewind", checkpoint_every=None)
    assert trainer.step == STEPS
    assert int(trainer.state.batches_left_out) == 3


def test_as_often_as_is_allowed(tmp_path):
    batches = (6, 12, 16)
    with pytest.raises(
        TrainingDiverged, match="The run has already made 2 rewinds, as many as RunPlan.max_rewinds"
    ):
        run(tmp_path / "two", made_again(*batches), on_divergence="rewind", max_rewinds=2)
    trainer = run(tmp_path / "three", made_again(*batches), on_divergence="rewind")
    assert int(trainer.state.rewinds) == 3


def test_a_run_that_is_cut_after_going_back_ends_the_same(tmp_path):
    """Cut before the next checkpoint, so that it diverges and goes back once more."""
    straight = weights(run(tmp_path / "straight", made_again(12, 17), on_divergence="rewind"))
    for cut_at in (11, 14, 16):
        folder = tmp_path / f"cut-{cut_at}"

        class Killed(BaseException):
            pass

        first = made_again(12, 17, steps_per_loop=1)
        original = first._runner.run_loop

        def until(end, first=first, original=original, cut_at=cut_at):
            original(end)
            if first.state.rewinds > 0 and first.step == cut_at:
                raise Killed

        first._runner.run_loop = until
        with pytest.raises(Killed):
            run(folder, first, on_divergence="rewind")
        second = run(folder, made_again(12, 17), on_divergence="rewind")
        for ours, theirs in zip(weights(second), straight, strict=True):
            np.testing.assert_array_equal(ours, theirs)
        assert lines(folder) == lines(tmp_path / "straight")
        assert lines(folder, "eval") == lines(tmp_path / "straight", "eval")


def interrupt():
    """Sends this process a signal and waits until it has been noted."""
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(1)


@pytest.mark.parametrize("at", [11, 12])
def test_a_run_that_is_stopped_before_it_diverges_ends_the_same(tmp_path, at):
    """It goes back to where the straight run goes, and not to what was saved on the signal."""
    straight = weights(run(tmp_path / "straight", made_again(12), on_divergence="rewind"))
    first = made_again(12, steps_per_loop=1)
    original = first._runner.run_loop

    def interrupted(end):
        original(end)
        if first.step == at:
            interrupt()

    first._runner.run_loop = interrupted
    with pytest.raises(TrainingInterrupted, match=f"at step {at} of 20, after saving"):
        run(tmp_path / "run", first, on_divergence="rewind")
    second = run(tmp_path / "run", made_again(12), on_divergence="rewind")
    for ours, theirs in zip(weights(second), straight, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert lines(tmp_path / "run") == lines(tmp_path / "straight")


def test_a_signal_where_the_weights_are_not_finite_saves_nothing(tmp_path):
    trainer = made_again(steps_per_loop=1)
    original = trainer._runner.run_loop

    def spoiled(end):
        original(end)
        if trainer.step == 7:
            trainer.optimizer.variables[-1].assign([np.nan, 0.0])
            interrupt()

    trainer._runner.run_loop = spoiled
    with pytest.raises(TrainingInterrupted, match="at step 7 of 20, without saving") as raised:
        run(tmp_path, trainer)
    assert raised.value.exit_status == 75
    assert [path.name for path in (tmp_path / "checkpoints").glob("*.index")] == ["step-5.index"]


@pytest.mark.parametrize("at", [0, 10])
def test_a_signal_before_the_first_update_repeats_no_line(tmp_path, at):
    """It may come while a run that resumes at a step with lines is still being traced."""
    straight = weights(run(tmp_path / "straight", made_again(), eval_every=5))
    if at:
        run(tmp_path / "run", made_again(), train_steps=at, eval_every=5)
    early = made_again()
    early.request_stop()
    original = early._runner.run_loop

    def interrupted(end):
        interrupt()
        original(end)

    early._runner.run_loop = interrupted
    with pytest.raises(TrainingInterrupted, match=f"at step {at} of 20"):
        run(tmp_path / "run", early, eval_every=5)
    second = run(tmp_path / "run", made_again(), eval_every=5)
    assert lines(tmp_path / "run") == lines(tmp_path / "straight")
    assert lines(tmp_path / "run", "eval") == lines(tmp_path / "straight", "eval")
    for ours, theirs in zip(weights(second), straight, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_the_sums_of_a_line_survive_a_stop(tmp_path):
    run(tmp_path / "straight", made_again(), log_every=10)
    first = made_again(steps_per_loop=1)
    original = first._runner.run_loop

    def interrupted(end):
        original(end)
        if first.step == 7:
            interrupt()

    first._runner.run_loop = interrupted
    with pytest.raises(TrainingInterrupted):
        run(tmp_path / "run", first, log_every=10)
    run(tmp_path / "run", made_again(), log_every=10)
    assert lines(tmp_path / "run") == lines(tmp_path / "straight")


def test_going_back_where_nothing_could_be_saved(tmp_path, monkeypatch):
    import shutil

    full = shutil._ntuple_diskusage(10**9, 10**9, 0)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    with pytest.raises(TrainingDiverged, match="There is no checkpoint to rewind to"):
        run(tmp_path, made_again(3), on_divergence="rewind")


def test_weights_that_are_not_finite_reach_no_checkpoint(tmp_path):
    trainer = made_again()
    original = trainer._runner.run_loop

    def spoiled(end):
        original(end)
        if trainer.step == 10:
            trainer.optimizer.variables[-1].assign([np.nan, 0.0])

    trainer._runner.run_loop = spoiled
    with pytest.raises(TrainingDiverged, match="step 10: .*momentum is not finite"):
        run(tmp_path, trainer)
    names = [path.name for path in (tmp_path / "checkpoints").glob("*.index")]
    assert names == ["step-5.index"]


def test_each_better_evaluation_is_saved(tmp_path):
    trainer = made_again()
    figures = iter([0.5, 0.8, 0.6, 0.7, 0.9, 0.1, 0.2])
    evaluate = trainer.evaluate
    trainer.evaluate = lambda: {**evaluate(), "accuracy": next(figures)}
    retention = Retention(1, best_metric="accuracy")
    run(tmp_path, trainer, eval_every=3, checkpoint_every=10, retention=retention)
    names = sorted(path.name for path in (tmp_path / "checkpoints").glob("*.index"))
    assert names == ["step-15.index", "step-20.index"]
    saved = CheckpointDirectory(tmp_path / "checkpoints").saved()[0]
    assert saved.metadata.metrics["accuracy"] == 0.9


def test_a_full_disk_is_reported_and_the_run_continues_to_its_end(tmp_path, monkeypatch):
    import shutil

    trainer, reported = made_again(), []

    def usage(path):
        filled = (tmp_path / "checkpoints" / "step-5.index").exists()
        return shutil._ntuple_diskusage(10**9, 0, 0 if filled else 10**9)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    with pytest.raises(ModelDirectoryError, match="step 20 could not be written"):
        run(tmp_path, trainer, reported)
    assert trainer.step == STEPS
    assert [text.split(" could")[0][-7:] for text in reported if "could not" in text] == [
        "step 10",
        "step 15",
        "step 20",
    ]
    assert [path.name for path in (tmp_path / "checkpoints").glob("*.index")] == ["step-5.index"]
    assert [line["step"] for line in lines(tmp_path)] == [5, 10, 15, 20]
