"""Trainings on rows that the run adds: parity, no reading ahead, resuming, other workers."""

import gc

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.callbacks import AfterSave, Every
from ddl.data import ReplayBuffer
from ddl.distribution.workers import Workers
from ddl.errors import ConfigError, DataError, TrainingDiverged
from tests.conftest import make_strategy

PLAN = {"train_steps": 12, "checkpoint_every": 5, "log_every": 1, "progress": False}


class Regression:
    def __init__(self):
        self.model = keras.Sequential([keras.Input((3,), dtype="float64"), dense(1)])

    def per_example(self, features, training):
        error = self.model(features["x"], training=training)[:, 0] - features["y"]
        return ddl.PerExample(error**2, {"added_at": tf.cast(features["added_at"], tf.float64)})


def dense(units):
    return keras.layers.Dense(units, dtype="float64")


def rows(moment_or_step, number):
    """Makes rows; those of a moment depend on the model too, as in self-play."""
    is_moment = hasattr(moment_or_step, "random")
    step = moment_or_step.step if is_moment else moment_or_step
    random = moment_or_step.random if is_moment else np.random.default_rng(step)
    x = random.normal(size=(number, 3))
    y = x.sum(1)
    if is_moment:
        y = y + 0.1 * moment_or_step.trainer.model(x).numpy()[:, 0]
    return {"x": x, "y": y, "added_at": np.full(number, step)}


def make_trainer(kind="one_device", replicas=1, capacity=20, beside=None, **arguments):
    keras.utils.set_random_seed(3)
    with make_strategy(kind, replicas).scope():
        buffer = ReplayBuffer(capacity, rows(0, 6))
        task = Regression() if beside is None else Both()
        data = buffer if beside is None else {"data": beside, "replay": buffer}
        return ddl.Trainer(
            task, keras.optimizers.SGD(0.05), data, global_batch_size=8, seed=5, **arguments
        )


class Both(Regression):
    """Learns from fixed data and from the buffer."""

    def step(self, update, batch):
        fixed = update.gradients(self.per_example, batch["data"], name="fixed")
        update.apply(fixed + update.gradients(self.replayed, batch["replay"]))

    def replayed(self, features, training):
        return ddl.PerExample(self.per_example(features, training).loss)


def fill(number=4):
    return Every(3, lambda moment: buffer_of(moment.trainer).add(rows(moment, number)))


def buffer_of(trainer):
    return [one.source for one in trainer.pipelines.values()][-1]


def ended(trainer):
    return [*(v.numpy() for v in trainer.model.variables), *buffer_of(trainer).contents().values()]


@pytest.fixture(scope="module")
def straight():
    ddl.fit(trainer := make_trainer(), callbacks=[fill()], **PLAN)
    return ended(trainer)


@pytest.mark.parametrize(
    ("kind", "replicas", "microbatches"),
    [("mirrored", 2, 1), ("mirrored", 4, 2), ("one_device", 1, 4), ("central_storage", 2, 1)],
)
def test_parity(straight, kind, replicas, microbatches):
    trainer = make_trainer(kind, replicas, accumulation_steps=microbatches)
    ddl.fit(trainer, callbacks=[fill()], **PLAN)
    for ours, theirs in zip(ended(trainer), straight, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-10)


@pytest.mark.parametrize("steps_per_loop", [1, 100])
def test_an_update_reads_what_was_added_before_it(steps_per_loop):
    """Every row is replaced at steps 3, 6 and 9."""
    trainer = make_trainer(capacity=6, steps_per_loop=steps_per_loop)
    history = ddl.fit(trainer, callbacks=[fill(6)], **PLAN)
    read = dict(zip(history.figures()["step"], history.figures()["added_at"], strict=True))
    # The update to step 4 is the first after the rows of step 3.
    assert read == {step: (step - 1) // 3 * 3 for step in range(1, 13)}
    assert trainer.trace_count == 1


@pytest.mark.parametrize("stops", [5, 6])
def test_resumed_it_ends_the_same(straight, tmp_path, stops):
    """Also from a checkpoint of the step that added rows; contents and all."""
    ddl.fit(make_trainer(), tmp_path, callbacks=[fill()], **{**PLAN, "train_steps": stops})
    for replicas in (1, 2):
        kind = "mirrored" if replicas > 1 else "one_device"
        trainer = make_trainer(kind, replicas)
        folder = tmp_path
        if replicas == 2:
            folder = tmp_path / "other"
            ddl.fit(make_trainer(), folder, callbacks=[fill()], **{**PLAN, "train_steps": stops})
        ddl.fit(trainer, folder, callbacks=[fill()], **PLAN)
        for ours, theirs in zip(ended(trainer), straight, strict=True):
            if replicas == 1:
                np.testing.assert_array_equal(ours, theirs)
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-10)


def test_beside_other_data_it_does_not_depend_on_replicas():
    beside = {name: value for name, value in rows(100, 24).items()}
    results = []
    for kind, replicas in (("one_device", 1), ("mirrored", 2)):
        trainer = make_trainer(kind, replicas, beside=beside)
        ddl.fit(trainer, callbacks=[fill()], **PLAN)
        assert buffer_of(trainer).added == 6 + 4 * 4
        results.append(ended(trainer))
    for ours, theirs in zip(*results, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-10)


def test_rows_with_weights():
    """The means, and the step of the bias, are those of the products with the weights."""

    class OfProducts(Regression):
        def per_example(self, features, training):
            error = self.model(features["x"], training=training)[:, 0] - features["y"]
            own = tf.cast(features["own"], tf.float64)
            values = {"own": own, "square": own * error**2, "slope": own * 2 * error}
            return ddl.PerExample(error**2, values)

    def trained(task, features):
        keras.utils.set_random_seed(3)
        with make_strategy("one_device", 1).scope():
            data = ReplayBuffer(20, features)
            trainer = ddl.Trainer(
                task(), keras.optimizers.SGD(0.0625), data, global_batch_size=8, seed=5
            )
        return trainer.train(1), trainer.model.layers[-1].bias.numpy()[0]

    weight = np.repeat([0.0, 1.0, 3.0, 0.5], 5).astype("f4")
    features = {**rows(0, 20), "own": weight}
    features["y"][:5] = 1e6
    plain, _ = trained(OfProducts, features)  # the same rows, which all count once
    assert plain["loss"] > 1e9
    found, bias = trained(Regression, {**features, "weight": weight})
    assert found["loss"] == pytest.approx(plain["square"] / plain["own"], rel=1e-10)
    assert bias == pytest.approx(-0.0625 * plain["slope"] / plain["own"], rel=1e-10)


def test_an_overflow_of_each_update_is_a_divergence():
    buffer = ReplayBuffer(8, x=np.full((8, 3), 1e200), y=np.zeros(8), added_at=np.zeros(8, int))
    keras.utils.set_random_seed(3)
    trainer = ddl.Trainer(
        Regression(),
        keras.optimizers.SGD(0.05),
        buffer,
        global_batch_size=8,
        loss_scale=ddl.LossScale(),
        max_skipped_updates=2,
    )
    with pytest.raises(
        TrainingDiverged, match="the gradients of 2 consecutive batches .* first gradient"
    ):
        trainer.train(5)


def test_the_task_checks_the_rows():
    """Those of the start, and those that a callback adds; the buffer does not keep the task."""
    x = np.ones((4, 3), "f4")

    def task(classes=2):
        return ddl.Classification(
            keras.Sequential([keras.Input((3,)), keras.layers.Dense(classes)])
        )

    def trainer(buffer, classes=2):
        return ddl.Trainer(task(classes), "sgd", buffer, global_batch_size=4)

    message = r"Labels must be from 0 to 1, since the model has 2 classes, got 0 to 2 \(first at"
    labels = np.array([0, 1, 2, 0])
    with pytest.raises(DataError, match=message):
        trainer(ReplayBuffer(8, image=x, label=labels))
    buffer = ReplayBuffer(8, image=x, label=labels % 2)
    made = trainer(buffer)
    with pytest.raises(DataError, match=message):
        buffer.add(image=x, label=labels)
    assert buffer.added == 4
    buffer.add(image=x, label=labels % 2)
    other = trainer(buffer, classes=3)
    buffer.add(image=x, label=labels)
    del made, other
    gc.collect()
    assert buffer._check_of_task() is None


def test_rows_of_a_loop_and_a_save_are_refused(tmp_path):
    trainer = make_trainer()
    late = AfterSave(lambda moment: moment.data.add(rows(moment, 1)))
    with pytest.raises(ConfigError, match="changed what a checkpoint holds, but after the save"):
        ddl.fit(trainer, tmp_path, callbacks=[late], **PLAN)


def test_workers_with_other_rows_are_refused(monkeypatch):
    trainer = make_trainer()
    monkeypatch.setattr(Workers, "number", 2, raising=False)
    monkeypatch.setattr(Workers, "barrier", lambda self: None)
    (pipeline,) = trainer.pipelines.values()
    init = Workers.__init__

    def two(self, strategy):
        init(self, strategy)
        self.number = 2

    monkeypatch.setattr(Workers, "__init__", two)
    gather = lambda self, values: np.stack([values, values])  # noqa: E731
    monkeypatch.setattr(Workers, "gather", gather)
    with pipeline.reading(trainer.strategy):
        pass
    monkeypatch.setattr(Workers, "gather", lambda self, values: np.stack([values, values + 1]))
    with (
        pytest.raises(ConfigError, match="worker 1 added others than worker 0"),
        pipeline.reading(trainer.strategy),
    ):
        pass
