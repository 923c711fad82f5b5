import dataclasses
import functools
import shutil
import threading
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.checkpoints.checkpoints import Checkpoints
from ddl.checkpoints.retention import Retention
from ddl.errors import ConfigError, ModelDirectoryError
from ddl.precision import set_precision
from tests.conftest import make_strategy, save
from tests.training.rewinding import Start
from tests.training.test_trainer import DATA, make_trainer, weights_and_slots


def assert_equal(one, other, atol=0.0):
    for value, reference in zip(weights_and_slots(one), weights_and_slots(other), strict=True):
        np.testing.assert_allclose(value, reference, rtol=0, atol=atol)


@functools.cache
def _start_on_one_device() -> Start:
    return Start(make_trainer(make_strategy("one_device", 1)))


def on_one_device() -> ddl.Trainer:
    """Returns a trainer at its start. All callers share the trainer, which is traced once."""
    set_precision("float64")
    return _start_on_one_device().again()


def test_what_is_drawn_at_random_goes_on_too(tmp_path):
    """By a layer of Keras; tests/contract/test_resume.py draws with ddl.random."""

    def trainer(seed):
        keras.utils.set_random_seed(seed)
        strategy = make_strategy("mirrored", 2)
        with strategy.scope():
            layers = [keras.layers.Flatten(), keras.layers.Dropout(0.5), keras.layers.Dense(2)]
            model = keras.Sequential([keras.Input((6, 6, 1)), *layers])
            task = ddl.Classification(model, augmentations=[ddl.layers.RandomShift(1, 1)])
            return ddl.Trainer(task, keras.optimizers.SGD(1e-3), DATA, global_batch_size=32)

    first, second = trainer(1), trainer(2)  # another seed: what counts is in the checkpoint
    first.train(3)
    save(tmp_path, first)
    Checkpoints(tmp_path, second).restore_latest()
    assert first.train(4) == second.train(4)
    assert_equal(first, second)


def test_checkpoints_of_all_strategies_hold_the_same_tensors(tmp_path):
    held = []
    for name, replicas in [("one_device", 1), ("mirrored", 4), ("central_storage", 2)]:
        trainer = make_trainer(make_strategy(name, replicas))
        path = save(tmp_path / name, trainer)
        held.append(tf.train.load_checkpoint(path).get_variable_to_shape_map())
    assert held[0] == held[1] == held[2]
    assert any("state/step" in name for name in held[0])


def test_keeps_the_latest(tmp_path):
    trainer = on_one_device()
    checkpoints = Checkpoints(tmp_path, trainer, Retention(last=2))
    for _ in range(3):
        trainer.train(1)
        checkpoints.save()
    checkpoints.finish()
    assert sorted(path.name for path in tmp_path.glob("*.index")) == [
        "step-2.index",
        "step-3.index",
    ]


def test_nothing_to_restore(tmp_path):
    checkpoints = Checkpoints(tmp_path / "none", make_trainer(make_strategy("one_device", 1)))
    assert not checkpoints.restore_latest()
    assert not (tmp_path / "none").exists()


def test_a_checkpoint_of_another_model(tmp_path):
    trainer = make_trainer(make_strategy("one_device", 1))
    save(tmp_path, trainer)
    other = make_trainer(make_strategy("one_device", 1), precision="float32")
    with pytest.raises(ModelDirectoryError, match=r"step-0 cannot be restored"):
        Checkpoints(tmp_path, other).restore_latest()


def cut(path, size=-20):
    content = path.read_bytes()
    path.write_bytes(content[:size])


def saved_at(folder, *steps):
    trainer = on_one_device()
    checkpoints = Checkpoints(folder, trainer)
    for step in steps:
        trainer.train(step - trainer.step)
        checkpoints.save()
    checkpoints.finish()
    return trainer


def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_taken(tmp_path):
    straight = saved_at(tmp_path, 2, 4, 6)
    cut(tmp_path / "step-6.index")
    cut(tmp_path / "step-4.data-00000-of-00001")
    reported = []
    second = make_trainer(make_strategy("one_device", 1))
    checkpoints = Checkpoints(tmp_path, second, report=reported.append)
    assert checkpoints.restore_latest().step == 2
    assert [text.split(" is damaged")[0][-6:] for text in reported] == ["step-6", "step-4"]
    assert "and was moved to" in reported[0]
    assert sorted(p.name for p in (tmp_path / "damaged").iterdir()) == ["step-4", "step-6"]
    assert [each.step for each in checkpoints.saved()] == [2]
    second.train(4)
    assert_equal(second, straight)


def test_where_all_are_damaged_nothing_is_touched(tmp_path):
    saved_at(tmp_path, 2, 4)
    for step in (2, 4):
        cut(tmp_path / f"step-{step}.index")
    before = sorted(tmp_path.rglob("*"))
    checkpoints = Checkpoints(tmp_path, make_trainer(make_strategy("one_device", 1)))
    for restore in (checkpoints.restore_latest, checkpoints.restore_model):
        with pytest.raises(ModelDirectoryError, match=r"(?s)No checkpoint .*step-4.*step-2"):
            restore()
    assert sorted(tmp_path.rglob("*")) == before


def test_reading_a_model_moves_no_file(tmp_path):
    saved_at(tmp_path, 2, 4)
    cut(tmp_path / "step-4.index")
    before = sorted(tmp_path.rglob("*"))
    reported = []
    checkpoints = Checkpoints(
        tmp_path, make_trainer(make_strategy("one_device", 1)), report=reported.append
    )
    assert checkpoints.restore_model().step == 2
    assert "the checkpoint before it is used" in reported[0]
    assert sorted(tmp_path.rglob("*")) == before


def test_reading_a_model_where_there_is_none_fails(tmp_path):
    checkpoints = Checkpoints(tmp_path, make_trainer(make_strategy("one_device", 1)))
    with pytest.raises(ModelDirectoryError, match="There is no checkpoint in"):
        checkpoints.restore_model()


def test_another_batch_size_is_an_error(tmp_path):
    saved_at(tmp_path, 2)
    other = make_trainer(make_strategy("mirrored", 2), batch=64)
    with pytest.raises(ModelDirectoryError, match="global batch size must be 32, .*, got 64"):
        Checkpoints(tmp_path, other).restore_latest()
    assert Checkpoints(tmp_path, other).restore_model().step == 2


def test_other_data_are_an_error(tmp_path):
    saved_at(tmp_path, 2)
    other = make_trainer(make_strategy("one_device", 1), {k: v[:100] for k, v in DATA.items()})
    with pytest.raises(ModelDirectoryError, match="training examples must be 130, .*, got 100"):
        Checkpoints(tmp_path, other).restore_latest()


def with_own_moments():
    set_precision("float64")
    keras.utils.set_random_seed(0)
    with make_strategy("mirrored", 2).scope():
        layers = [keras.layers.Flatten(), keras.layers.BatchNormalization(), keras.layers.Dense(2)]
        model = keras.Sequential([keras.Input((6, 6, 1)), *layers])
        return ddl.Trainer(
            ddl.Classification(model),
            keras.optimizers.SGD(1e-3),
            DATA,
            global_batch_size=32,
            batch_moments="per_replica",
            weight_average=ddl.ExponentialMovingAverage(0.5),
        )


def test_a_save_at_any_step_changes_nothing_with_moments_per_replica(tmp_path):
    straight, first, second = (with_own_moments() for _ in range(3))
    straight.train(6)
    first.train(3)
    save(tmp_path, first)
    Checkpoints(tmp_path, second).restore_latest()
    second.train(3)
    assert_equal(second, straight)
    for variable in second.model.non_trainable_variables:
        ours, theirs = second.strategy.experimental_local_results(variable.value)
        np.testing.assert_array_equal(ours, theirs)


def test_a_save_takes_the_moment_and_training_goes_on(tmp_path, monkeypatch):
    trainer = make_trainer(make_strategy("mirrored", 2))
    trainer.train(3)
    before = weights_and_slots(trainer)
    checkpoints = Checkpoints(tmp_path, trainer)
    write, gate = checkpoints._directory.write, threading.Event()

    def late(*arguments):
        gate.wait(30)
        return write(*arguments)

    monkeypatch.setattr(checkpoints._directory, "write", late)
    checkpoints.save()
    trainer.train(4)
    assert not list(tmp_path.iterdir())
    gate.set()
    other = make_trainer(make_strategy("mirrored", 2))
    assert [each.step for each in checkpoints.saved()] == [3]
    Checkpoints(tmp_path, other).restore_latest()
    for value, reference in zip(weights_and_slots(other), before, strict=True):
        np.testing.assert_array_equal(value, reference)


def test_a_save_that_fails_is_reported_and_the_next_one_counts(tmp_path, monkeypatch):
    trainer = saved_at(tmp_path, 2)
    reported = []
    checkpoints = Checkpoints(tmp_path, trainer, report=reported.append)
    with monkeypatch.context() as patched:
        patched.setattr("shutil.disk_usage", lambda path: shutil._ntuple_diskusage(9, 9, 0))
        trainer.train(1)
        checkpoints.save()
        with pytest.raises(ModelDirectoryError, match="but 0.0 MB are free"):
            checkpoints.finish()
    assert len(reported) == 1
    assert [each.step for each in checkpoints.saved()] == [2]
    checkpoints.save()
    checkpoints.finish()
    assert [each.step for each in checkpoints.saved()] == [2, 3]


def test_what_must_come_first_does(tmp_path):
    """If lines cannot be brought to the disk, there is no checkpoint either."""

    def fails():
        raise ModelDirectoryError("metrics.jsonl cannot be written")

    trainer = make_trainer(make_strategy("one_device", 1))
    checkpoints = Checkpoints(tmp_path, trainer, report=lambda text: None, before_write=fails)
    checkpoints.save()
    with pytest.raises(ModelDirectoryError, match=r"metrics.jsonl"):
        checkpoints.finish()
    assert checkpoints.saved() == []


def test_a_list_that_fell_behind_catches_up(tmp_path):
    """As after a kill between a checkpoint's index and the list."""
    trainer = saved_at(tmp_path, 2, 4)
    (tmp_path / "checkpoint").write_text('model_checkpoint_path: "step-2"\n')
    Checkpoints(tmp_path, trainer, Retention(1)).restore_latest()
    assert tf.train.latest_checkpoint(str(tmp_path)) == str(tmp_path / "step-4")
    assert not list(tmp_path.glob("step-2.*"))


def test_an_old_one_that_cannot_be_removed_is_reported(tmp_path, monkeypatch):
    trainer = saved_at(tmp_path, 2)
    reported = []
    checkpoints = Checkpoints(tmp_path, trainer, Retention(1), reported.append)

    def refuses(path, missing_ok):
        raise PermissionError(1, "Operation not permitted")

    trainer.train(1)
    with monkeypatch.context() as patched:
        patched.setattr("pathlib.Path.unlink", refuses)
        checkpoints.save()
        checkpoints.finish()
    assert [text for text in reported if "could not be removed" in text]
    assert [each.step for each in checkpoints.saved()] == [2, 3]


def test_one_that_its_run_has_just_removed_is_not_damaged(tmp_path):
    """As when an evaluation looks beside a training that keeps one checkpoint."""
    trainer = saved_at(tmp_path, 2, 4)
    checkpoints = Checkpoints(tmp_path, trainer, report=pytest.fail)
    directory = checkpoints._directory
    check = directory.check

    def removed_first(saved):
        if saved.step == 4:
            directory.remove([saved])
        check(saved)

    directory.check = removed_first
    assert checkpoints.restore_model().step == 2


def test_going_back_passes_over_what_was_saved_on_a_signal(tmp_path):
    trainer = saved_at(tmp_path, 2)
    checkpoints = Checkpoints(tmp_path, trainer)
    trainer.train(1)
    checkpoints.save(scheduled=False)
    assert checkpoints.restore_latest().step == 3
    assert checkpoints.restore_latest(scheduled=True).step == 2
    assert [each.step for each in checkpoints.saved()] == [2]


def test_a_step_is_saved_once(tmp_path):
    trainer = saved_at(tmp_path, 2)
    checkpoints = Checkpoints(tmp_path, trainer)
    checkpoints.restore_latest()
    before = (tmp_path / "step-2.index").stat().st_mtime_ns
    checkpoints.save()
    checkpoints.finish()
    assert (tmp_path / "step-2.index").stat().st_mtime_ns == before


def test_the_best(tmp_path):
    trainer = on_one_device()
    checkpoints = Checkpoints(tmp_path, trainer, Retention(1, best_metric="accuracy"))
    for accuracy in (0.5, 0.9, 0.7):
        trainer.train(1)
        checkpoints.save({"accuracy": accuracy})
    assert [each.step for each in checkpoints.saved()] == [2, 3]
    assert checkpoints.best().step == 2
    assert not checkpoints.would_be_best({"accuracy": 0.9})
    assert checkpoints.would_be_best({"accuracy": 0.91})


class OtherWorker:
    """One that is not the chief, and hears these answers of it."""

    number, index, is_chief = 2, 1, False

    def __init__(self, *answers):
        self.answers = list(answers)

    def broadcast(self, value):
        assert not value  # it has looked at nothing itself
        return self.answers.pop(0)


@pytest.mark.parametrize("answer", [0, 1])
def test_what_the_chief_sees_in_the_folder_counts(tmp_path, answer):
    """Saving is done by all: none may go by a list of its own, which may be older."""
    trainer = make_trainer(make_strategy("one_device", 1))
    checkpoints = Checkpoints(tmp_path, trainer, Retention(1, best_metric="accuracy"))
    checkpoints._workers = OtherWorker(answer, answer)
    assert checkpoints.would_be_best({"accuracy": 0.9}) is bool(answer)
    assert checkpoints.has_any() is bool(answer)


def test_the_clock_goes_on(tmp_path):
    first = make_trainer(make_strategy("one_device", 1))
    first.pace.total_seconds = 100.0
    save(tmp_path, first)
    second = make_trainer(make_strategy("one_device", 1))
    Checkpoints(tmp_path, second).restore_latest()
    assert second.pace.total_seconds == 100.0


def everything(seed):
    """A trainer that has all that a checkpoint must hold."""
    set_precision("mixed_float16")
    keras.utils.set_random_seed(seed)
    with make_strategy("mirrored", 2).scope():
        layers = [
            keras.layers.Rescaling(1 / 255),
            keras.layers.Flatten(),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.3),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(2),
        ]
        return ddl.Trainer(
            ddl.Classification(keras.Sequential([keras.Input((6, 6, 1)), *layers])),
            keras.optimizers.SGD(0.01, momentum=0.9),
            DATA,
            global_batch_size=32,
            eval_data=DATA,
            accumulation_steps=2,
            batch_moments="per_replica",
            clip_norm=1.0,
            weight_average=ddl.ExponentialMovingAverage(0.5),
            loss_scale=ddl.LossScale(2.0**4, growth_interval=3),
        )


@dataclasses.dataclass(frozen=True)
class Straight:
    """The figures of a run of 9 updates, and a checkpoint of the fourth update."""

    folder: Path
    means: list[dict[str, float]]
    values: list[np.ndarray]
    loss_scale: float

    @staticmethod
    def measured(trainer) -> list[dict[str, float]]:
        return [trainer.train(5), trainer.evaluate(), trainer.evaluate(averaged=False)]


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Straight:
    folder = tmp_path_factory.mktemp("first")
    trainer = everything(1)
    start = Start(trainer)
    trainer._runner.run_loop(4)
    means = Straight.measured(trainer)
    result = Straight(folder, means, weights_and_slots(trainer), trainer.loss_scale)
    start.again()._runner.run_loop(4)
    save(folder, trainer)
    return result


@functools.cache
def _start_of_the_second() -> Start:
    return Start(everything(2))


def check_that_a_run_goes_on_as_the_straight_one(straight):
    """Resumes with another seed, so that a part that is not restored shows."""
    set_precision("mixed_float16")
    second = _start_of_the_second().again()
    Checkpoints(straight.folder, second).restore_latest()
    assert Straight.measured(second) == straight.means
    assert second.loss_scale == straight.loss_scale
    for value, reference in zip(weights_and_slots(second), straight.values, strict=True):
        np.testing.assert_array_equal(value, reference)


def test_a_run_goes_on_as_the_straight_one(straight):
    check_that_a_run_goes_on_as_the_straight_one(straight)


LOST = {
    "the place in the data": lambda trainer: ["batches"],
    "metric sums": lambda trainer: ["sums"],
    "the loss scale": lambda trainer: ["loss_scale"],
    "when it grows": lambda trainer: ["finite_updates"],
    # Without the count of updates, which the trainer compares with its own.
    "slots": lambda trainer: [v.value for v in trainer.optimizer.variables[1:]],
    "averages": lambda trainer: trainer.averages.variables,
    "moving moments": lambda trainer: [
        v.value for v in trainer.model.non_trainable_variables if "moving" in v.path
    ],
}


@pytest.mark.parametrize("lost", LOST)
def test_each_part_of_a_checkpoint_counts(straight, monkeypatch, lost):
    """Left as it was before, in place of being restored, each one is missed."""
    restore = Checkpoints.restore_latest

    def forgetful(self):
        trainer = self._trainer
        parts = LOST[lost](trainer)
        before = [
            getattr(trainer.state, part) if isinstance(part, str) else part.read_value()
            for part in parts
        ]
        saved = restore(self)
        for part, value in zip(parts, before, strict=True):
            if isinstance(part, str):
                trainer.state = trainer.state._replace(**{part: value})
            else:
                part.assign(value)
        return saved

    monkeypatch.setattr(Checkpoints, "restore_latest", forgetful)
    with pytest.raises(AssertionError):
        check_that_a_run_goes_on_as_the_straight_one(straight)


class Watching:
    """Writes variables of its own in its loss."""

    def __init__(self):
        self.model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        self.count, self.unknown, self.usual = (
            tf.Variable(start, trainable=False, name=name)
            for start, name in ((0, "count"), (np.nan, "unknown"), (0.0, "usual"))
        )
        self.mean = tf.Variable(0.0, trainable=False, aggregation=tf.VariableAggregation.MEAN)
        self.writes = self.mean

    def per_example(self, features, training):
        loss = self.model(features["x"])[:, 0] ** 2
        if training:
            self.count.assign_add(1)
            self.writes.assign(tf.cast(tf.reduce_mean(features["x"]), tf.float32))
        return ddl.PerExample(loss)


@pytest.mark.parametrize("writes", ["mean", "usual"])
def test_a_variable_that_differs_between_replicas_is_not_saved(tmp_path, writes):
    """Where a loss writes the same on all replicas, it is."""
    with make_strategy("mirrored", 2).scope():
        task = Watching()
        task.writes = getattr(task, writes)
        data = {"x": np.arange(8, dtype="f4").reshape(4, 2)}
        trainer = ddl.Trainer(
            task, keras.optimizers.SGD(0.0), data, global_batch_size=4, shuffle=False
        )
    if writes == "mean":
        trainer.train(1)
        save(tmp_path, trainer)
        assert float(task.mean.numpy()) == pytest.approx(3.5)
        return
    for call in (lambda: trainer.train(1), Checkpoints(tmp_path, trainer).save):
        with pytest.raises(ConfigError, match=r"'usual' of Watching has other .*: \[.*update.mean"):
            call()
    assert not [*tmp_path.iterdir()]
