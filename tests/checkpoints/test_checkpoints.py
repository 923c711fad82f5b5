"""Saving and restoring a Trainer beside what tests/contract/test_resume.py shows."""

import contextlib
import json

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.checkpoints import contents
from ddl.checkpoints.checkpoints import Checkpoints
from ddl.checkpoints.directory import Retention
from ddl.errors import ModelDirectoryError
from tests.conftest import make_strategy, save
from tests.training.test_trainer import DATA, make_trainer, weights_and_slots


@pytest.fixture(scope="module")
def trainer():
    """A trainer that all tests of the module train further."""
    return make_trainer(make_strategy("one_device", 1), weight_average=RULE)


@pytest.fixture(scope="module")
def other():
    """A trainer into which they restore."""
    return make_trainer(make_strategy("one_device", 1), weight_average=RULE)


RULE = ddl.ExponentialMovingAverage(0.5)


def assert_equal(one, other):
    for value, reference in zip(weights_and_slots(one), weights_and_slots(other), strict=True):
        np.testing.assert_array_equal(value, reference)


def saved_at(folder, trainer, *steps, **arguments):
    """Saves after so many more steps each; returns the steps."""
    checkpoints, start = Checkpoints(folder, trainer, **arguments), trainer.step
    for step in steps:
        trainer.train(start + step - trainer.step, progress=False)
        checkpoints.save()
    checkpoints.finish()
    return [start + step for step in steps]


def damage(folder, step, ending):
    path = folder / f"step-{step}.{ending}"
    path.write_bytes(path.read_bytes()[:-20])


def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_taken(tmp_path, trainer, other):
    first, second, third = saved_at(tmp_path, trainer, 2, 4, 6)
    damage(tmp_path, third, "index")
    damage(tmp_path, second, "json")
    before, reported = sorted(tmp_path.rglob("*")), []
    checkpoints = Checkpoints(tmp_path, other, report=reported.append)
    assert checkpoints.restore_model().step == first  # which moves no file
    assert sorted(tmp_path.rglob("*")) == before
    assert checkpoints.restore_latest().step == first
    told = [int(text.partition(" is damaged: ")[0].rpartition("-")[2]) for text in reported]
    assert told == [third, second, third, second]
    assert len(list(tmp_path.glob("*.damaged"))) == 6  # files
    assert [each.step for each in checkpoints.saved()] == [first]
    other.train(4, progress=False)
    assert_equal(other, trainer)


def test_other_batches_or_data_are_refused_for_training_alone(tmp_path, trainer):
    (step,) = saved_at(tmp_path, trainer, 1)
    data = {name: values[:100] for name, values in DATA.items()}
    mirrored = make_strategy("mirrored", 2)
    changed = make_trainer(mirrored, data, 64, weight_average=RULE, loss_scale=ddl.LossScale())
    message = "its loss scaling is False, expected True, its global batch size is 32, expected 64"
    with pytest.raises(ModelDirectoryError, match=f"cannot be restored: {message}"):
        Checkpoints(tmp_path, changed).restore_latest()
    assert Checkpoints(tmp_path, changed).restore_model().step == step
    without = make_trainer(make_strategy("one_device", 1))
    with pytest.raises(ModelDirectoryError, match=r"averages/0000 is .* expected nothing"):
        Checkpoints(tmp_path, without).restore_model()  # would evaluate other weights


def test_a_resumed_run_may_count_its_stream(tmp_path):
    stream = tf.data.Dataset.from_tensor_slices(DATA).filter(lambda _: True)
    counted = make_trainer(make_strategy("one_device", 1), stream)
    save(tmp_path, counted)
    counted.count_examples()
    assert Checkpoints(tmp_path, counted).restore_latest().step == 0


def test_other_packed_rows_are_refused_but_not_a_count(tmp_path, trainer, monkeypatch):
    first, other = (ddl.data.packed([[1]] * 9, 2, seed=seed) for seed in range(2))
    pipeline = trainer.pipelines[""]
    monkeypatch.setattr(pipeline, "source", first)
    with monkeypatch.context() as uncounted:
        uncounted.setattr(pipeline, "num_examples", None)
        save(tmp_path, trainer)
    Checkpoints(tmp_path, trainer).restore_latest()
    monkeypatch.setattr(pipeline, "source", other)
    with pytest.raises(ModelDirectoryError, match="its digest of lengths of documents"):
        Checkpoints(tmp_path, trainer).restore_latest()


def test_a_snapshot_stays_where_rows_are_updated_in_place(tmp_path):
    """Sparse updates write into a variable's memory unless they know that it is shared."""
    with make_strategy("one_device", 1).scope():
        layers = [keras.layers.Embedding(50, 4), keras.layers.Flatten(), keras.layers.Dense(2)]
        model = keras.Sequential([keras.Input((3,), dtype="int32"), *layers])
        data = {"image": np.arange(96).reshape(32, 3) % 50, "label": np.arange(32) % 2}
        rule = keras.optimizers.SGD(0.1)
        trainer = ddl.Trainer(ddl.Classification(model), rule, data, global_batch_size=8)
    trainer.train(1, progress=False)
    taken = contents.snapshot(Checkpoints(tmp_path, trainer)._values, trainer.strategy)
    before = {name: np.array(value.numpy()) for name, value in taken.items()}
    trainer.train(4, progress=False)
    assert not np.array_equal(model.layers[0].embeddings.numpy(), before["model/0000"])
    for name, value in taken.items():
        np.testing.assert_array_equal(value.numpy(), before[name], err_msg=name)


def test_a_save_that_fails_is_reported_and_the_next_one_counts(tmp_path, trainer, monkeypatch):
    reported = []
    checkpoints = Checkpoints(tmp_path, trainer, report=reported.append)

    def full(**arguments):
        raise tf.errors.ResourceExhaustedError(None, None, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(tf.raw_ops, "SaveV2", full)
        checkpoints.save()
        assert checkpoints.written() is None
        with pytest.raises(ModelDirectoryError, match="No space left"):
            checkpoints.finish()
    assert len(reported) == 1
    assert checkpoints.saved() == []
    assert checkpoints.save()  # of the same step
    assert checkpoints.written() == tmp_path / f"step-{trainer.step}"
    assert not checkpoints.save()


def test_a_checkpoint_that_its_run_has_just_removed_is_not_damaged(tmp_path, trainer, other):
    """As when an evaluation looks beside a training that keeps one checkpoint."""
    first, second = saved_at(tmp_path, trainer, 1, 2)
    checkpoints = Checkpoints(tmp_path, other, report=pytest.fail)
    directory = checkpoints._directory
    damage_of = directory.damage_of

    def removed_first(saved):
        if saved.step == second:
            directory.remove([saved])
        return damage_of(saved)

    directory.damage_of = removed_first
    assert checkpoints.restore_model().step == first


def test_the_best_is_kept_and_no_json_holds_nan(tmp_path, trainer):
    checkpoints = Checkpoints(tmp_path, trainer, Retention(1, best_metric="accuracy"))
    start = trainer.step
    for accuracy in (0.5, 0.9, np.nan):
        trainer.train(1, progress=False)
        checkpoints.save({"accuracy": accuracy, "loss": np.inf if accuracy == 0.9 else 1.0})
    checkpoints.finish()  # which removes what need not be kept
    assert [each.step for each in checkpoints.saved()] == [start + 2, start + 3]
    assert not checkpoints.would_be_best({"accuracy": 0.9})
    assert checkpoints.would_be_best({"accuracy": 0.91})
    for path in tmp_path.glob("*.json"):
        json.loads(path.read_text(), parse_constant=pytest.fail)
    assert checkpoints.restore_model("best").step == trainer.step == start + 2
    checkpoints.restore_latest()


class TwoWorkers:
    """Two workers of which this one is the first or the second, and what the other says."""

    number = 2

    def __init__(self, index=0, broadcasts=(), other_digest=0.0):
        self.index, self.is_chief = index, index == 0
        self.answers, self.other_digest = list(broadcasts), other_digest

    def broadcast(self, value):
        return self.answers.pop(0) if self.answers else value

    def any(self, value):
        return value

    def gather_texts(self, text):
        return [self.answers.pop(0) if self.answers else text, text]

    def gather(self, values):
        return np.stack([values, values + self.other_digest])

    def barrier(self):
        pass

    @contextlib.contextmanager
    def failing_together(self):
        self.together = True
        yield
        self.together = False


@pytest.mark.parametrize("part", ["differences", "assign"])
def test_a_misfit_of_one_worker_fails_on_all(tmp_path, trainer, other, monkeypatch, part):
    saved_at(tmp_path, trainer, 1)
    checkpoints, seen = Checkpoints(tmp_path, other), []
    checkpoints._workers = TwoWorkers()
    original = getattr(contents, part)

    def noted(*given):
        seen.append(checkpoints._workers.together)
        return original(*given)

    monkeypatch.setattr(contents, part, noted)
    checkpoints.restore_model()
    checkpoints.restore_latest()
    assert seen == [True, True]


def test_a_worker_with_another_folder_is_found(tmp_path, trainer, other):
    (step,) = saved_at(tmp_path / "chief", trainer, 1)
    before = weights_and_slots(other)
    checkpoints = Checkpoints(tmp_path / "chief", other)
    checkpoints._workers = TwoWorkers(other_digest=1.0)
    with pytest.raises(ModelDirectoryError, match="worker 1 has another digest .* model_dir"):
        checkpoints.restore_latest()
    without = Checkpoints(tmp_path / "empty", other)
    without._workers = TwoWorkers(1, [step])
    with pytest.raises(ModelDirectoryError, match=rf"step-{step} cannot be read.*chief's model"):
        without.restore_model()
    for value, reference in zip(weights_and_slots(other), before, strict=True):
        np.testing.assert_array_equal(value, reference)
