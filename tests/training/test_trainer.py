"""The Trainer in plain Python. tests/contract/test_parity.py compares it with a plain loop.

The optimizer is SGD, because Adam hides a wrong scale of the gradient. Nearly all the time goes
into tracing, so a test asserts several things of one traced trainer.
"""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.errors import ConfigError, DataError, TrainingDiverged
from ddl.precision import set_precision
from ddl.training.actions import EachLoop
from ddl.training.pace import Pace
from tests.conftest import make_strategy
from tests.training.overflowing import Overflowing
from tests.training.rewinding import Start

_RANDOM = np.random.default_rng(0)
LABELS = _RANDOM.integers(0, 2, 130)
IMAGES = (_RANDOM.integers(0, 155, (130, 6, 6, 1)) + 100 * LABELS.reshape(-1, 1, 1, 1)).astype("u1")
DATA = {"image": IMAGES, "label": LABELS}
UNEVEN = {**DATA, "weight": _RANDOM.uniform(0, 3, 130).astype(np.float32)}


def make_trainer(strategy, data=None, batch=32, precision="float64", l2=0.0, **arguments):
    """A small CNN with momentum, everything from one seed."""
    set_precision(precision)
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = ddl.models.cnn((6, 6, 1), 2, blocks=((4,),), hidden_units=(8,))
        for variable in model.trainable_variables:
            variable.regularizer = keras.regularizers.L2(l2) if l2 else None
        weight_decay = arguments.pop("weight_decay", None)
        rate = arguments.pop("schedule", 0.05)
        optimizer = keras.optimizers.SGD(rate, momentum=0.9, weight_decay=weight_decay)
        return ddl.Trainer(
            arguments.pop("task", ddl.Classification)(model),
            optimizer,
            DATA if data is None else data,
            global_batch_size=batch,
            eval_data=arguments.pop("eval_data", DATA),
            seed=5,
            **arguments,
        )


def weights_and_slots(trainer) -> list[np.ndarray]:
    """Returns all but the states of Keras's seed generators, which no draw of a trainer reads."""
    variables = [v for v in trainer.model.variables if "seed_generator" not in v.path]
    return [v.numpy() for v in [*variables, *trainer.optimizer.variables]]


@functools.cache
def _start_on_two_replicas() -> Start:
    return Start(make_trainer(make_strategy("mirrored", 2)))


def on_two_replicas(steps_per_loop=None) -> ddl.Trainer:
    """Returns a trainer at its start. All callers share the trainer, which is traced once."""
    set_precision("float64")
    trainer = _start_on_two_replicas().again()
    trainer._runner._pace = Pace(steps_per_loop)
    return trainer


def test_without_a_strategy_the_trainer_uses_the_default_one():
    trainer = make_trainer(tf.distribute.get_strategy())
    other = make_trainer(make_strategy("one_device", 1))
    assert trainer.train(3) == other.train(3)
    for value, expected in zip(weights_and_slots(trainer), weights_and_slots(other), strict=True):
        np.testing.assert_array_equal(value, expected)


def test_one_trace_serves_all_loops():
    """All operations of a loop are in one graph: Python runs only while the graph is traced."""
    trainer = make_trainer(make_strategy("mirrored", 2), steps_per_loop=10)
    loops, traced = [], 0
    per_example = trainer.task.per_example

    def counted(features, training):
        nonlocal traced
        # The check of row independence calls it eagerly, before the loop.
        traced += training and not tf.executing_eagerly()
        return per_example(features, training)

    trainer.task.per_example = counted
    trainer.trace()
    assert (trainer.step, trainer.trace_count, traced) == (0, 1, 2)  # once a replica
    trainer.train(25, [EachLoop(loops.append)])
    trainer.evaluate()
    trainer.train(15, [EachLoop(loops.append)])
    assert loops == [10, 20, 25, 35, 40]
    assert (trainer.trace_count, traced) == (1, 2)


def test_neither_the_length_of_the_loops_nor_an_evaluation_changes_a_bit():
    trainer = on_two_replicas(steps_per_loop=20)
    metrics, values = trainer.train(20), weights_and_slots(trainer)
    for steps_per_loop in (1, 7, None):
        trainer = on_two_replicas(steps_per_loop)
        assert trainer.train(20) == metrics
        for value, expected in zip(weights_and_slots(trainer), values, strict=True):
            np.testing.assert_array_equal(value, expected)
    trainer = on_two_replicas()
    trainer.train(7)
    trainer.evaluate()
    trainer.train(13)
    for value, expected in zip(weights_and_slots(trainer), values, strict=True):
        np.testing.assert_array_equal(value, expected)


def test_metrics_are_means_over_the_steps_since_the_last_reading():
    trainer = make_trainer(make_strategy("one_device", 1), batch=130, shuffle=False)
    before = trainer.evaluate()["loss"]
    assert trainer.train(1)["loss"] == pytest.approx(before)
    assert np.isnan(trainer.peek_metrics()["loss"])


def test_learns():
    trainer = on_two_replicas()
    trainer.train(200)
    assert trainer.evaluate()["accuracy"] > 0.9


def test_bfloat16_trains_without_a_loss_scale():
    strategy = make_strategy("mirrored", 2)
    assert make_trainer(strategy, precision="mixed_float16").loss_scale is not None
    trainer = make_trainer(strategy, precision="mixed_bfloat16", clip_norm=1.0)
    first = trainer.train(10)
    assert first["loss"] > trainer.train(40)["loss"]
    assert trainer.loss_scale is None
    assert trainer.step == 50


def test_float16_trains_and_an_overflow_is_skipped_and_halves_the_scale():
    strategy, scale = make_strategy("mirrored", 2), ddl.LossScale(initial=2.0**24)
    trainer = make_trainer(strategy, precision="mixed_float16", loss_scale=scale, clip_norm=1.0)
    before = weights_and_slots(trainer)
    # The first step takes several batches: each overflow skips one and halves the scale.
    trainer.train(1)
    assert trainer.step == 1
    assert trainer.skipped_updates > 0
    assert trainer.loss_scale == 2.0 ** (24 - trainer.skipped_updates)
    assert all(np.isfinite(value).all() for value in weights_and_slots(trainer))
    assert int(trainer.optimizer.iterations.numpy()) == 1
    assert any((a != b).any() for a, b in zip(before, weights_and_slots(trainer), strict=True))
    first = trainer.train(9)
    assert first["loss"] > trainer.train(40)["loss"]
    assert trainer.step == 50


def overflowing_trainer(strategy, schedule, batch_normalization=True, **arguments):
    set_precision("mixed_float16")
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = ddl.models.cnn(
            (6, 6, 1),
            2,
            blocks=((4,),),
            hidden_units=(8,),
            batch_normalization=batch_normalization,
        )
        return ddl.Trainer(
            Overflowing(model, schedule),
            keras.optimizers.SGD(0.05, momentum=0.9),
            DATA,
            global_batch_size=32,
            loss_scale=ddl.LossScale(1024.0),
            weight_average=ddl.ExponentialMovingAverage(0.9),
            **arguments,
        )


def all_copies(trainer) -> list[list[np.ndarray]]:
    """Every replica's copy of weights, moments, slots and averages."""
    variables = [v.value for v in [*trainer.model.variables, *trainer.optimizer.variables]]
    return [
        [copy.numpy() for copy in trainer.strategy.experimental_local_results(variable)]
        for variable in [*variables, *trainer.averages.variables]
    ]


@pytest.mark.parametrize(
    ("name", "replicas", "accumulation_steps"),
    [("mirrored", 2, 2), ("central_storage", 2, 1)],
)
def test_an_overflow_on_any_one_replica_changes_no_replica(name, replicas, accumulation_steps):
    strategy = make_strategy(name, replicas)
    check_that_overflows_change_nothing(
        strategy, range(replicas), accumulation_steps=accumulation_steps
    )


def check_that_overflows_change_nothing(strategy, on_replicas, **arguments):
    """Lets the replicas overflow one after the other: the first in batch 1, and so on."""
    order = tf.constant([-1, *on_replicas])
    trainer = overflowing_trainer(
        strategy, lambda batch: order[batch], max_skipped_updates=1, **arguments
    )
    trainer.train(1)
    before = all_copies(trainer)
    for skipped in range(1, len(on_replicas) + 1):
        # Calls the loop, which ends at the skipped update: `train` would raise TrainingDiverged,
        # and trace the gradients once more to say where they overflowed.
        state = trainer._runner.loop.run(trainer.state, 2)
        assert int(state.skipped_in_a_row) == 1
        trainer.state = state._replace(skipped_in_a_row=tf.zeros([], tf.int64))
        for ours, theirs in zip(all_copies(trainer), before, strict=True):
            np.testing.assert_array_equal(ours, theirs)
        figures = (trainer.step, trainer.skipped_updates, trainer.loss_scale)
        assert figures == (1, skipped, 1024.0 / 2**skipped)


def test_the_first_overflow_is_named():
    """Batches 0 to 2 overflow on replica 0, batches 3 to 5 on replica 1."""
    trainer = overflowing_trainer(
        make_strategy("mirrored", 2), lambda batch: batch // 3, max_skipped_updates=3
    )
    for replica, last in ((0, 2), (1, 5)):
        trainer.state = trainer.state._replace(skipped_in_a_row=tf.zeros([], tf.int64))
        with pytest.raises(TrainingDiverged) as raised:
            trainer.train(1)
        assert f"that of logits/bias on replica {replica}" in str(raised.value)
        assert f"number {last}" in str(raised.value)


def test_too_many_overflows_in_a_row_are_a_divergence():
    broken = {"image": IMAGES.astype(np.float32) * 1e30, "label": LABELS}
    trainer = make_trainer(
        make_strategy("one_device", 1), broken, precision="mixed_float16", max_skipped_updates=5
    )
    before = weights_and_slots(trainer)
    with pytest.raises(TrainingDiverged, match="5 consecutive batches"):
        trainer.train(10)
    assert trainer.step == 0
    for value, reference in zip(weights_and_slots(trainer), before, strict=True):
        np.testing.assert_array_equal(value, reference)


class WordBag:
    """A task with an embedding, whose gradient is sparse and names rows more than once."""

    def __init__(self):
        table = keras.layers.Embedding(5, 3, name="table")
        words = keras.Input((4,), dtype="int64")
        x = keras.layers.GlobalAveragePooling1D()(table(words))
        self.model = keras.Model(words, keras.layers.Dense(1)(x))

    def per_example(self, features, training):
        y = self.model(features["words"], training=training)[:, 0]
        return ddl.PerExample((y - features["target"]) ** 2)


def weights_with_adam(strategy, **arguments):
    random = np.random.default_rng(1)
    data = {"words": random.integers(0, 5, (32, 4)), "target": random.normal(size=32)}
    set_precision("float64")
    keras.utils.set_random_seed(3)
    with strategy.scope():
        task, optimizer = WordBag(), keras.optimizers.Adam(0.05)
    trainer = ddl.Trainer(
        task, optimizer, data, global_batch_size=16, strategy=strategy, **arguments
    )
    trainer.train(6)
    return [variable.numpy() for variable in task.model.variables]


@functools.cache
def weights_with_adam_of_one_device():
    return weights_with_adam(make_strategy("one_device", 1), accumulation_steps=4)


@pytest.mark.parametrize(
    ("where", "arguments"),
    [
        (("mirrored", 2), {"accumulation_steps": 2, "clip_norm": 1e9}),
        (("central_storage", 2), {}),
    ],
    ids=str,
)
def test_sparse_gradients_with_adam(where, arguments):
    """Adam squares the gradient, so the parts of a row must be added before."""
    ours = weights_with_adam(make_strategy(*where), **arguments)
    for value, expected in zip(ours, weights_with_adam_of_one_device(), strict=True):
        np.testing.assert_allclose(value, expected, rtol=0, atol=1e-10)


def test_bad_data_in_a_stream_are_told_in_a_few_words():
    labels = tf.data.Dataset.from_tensor_slices((IMAGES, LABELS + 5))
    trainer = make_trainer(make_strategy("one_device", 1), labels)
    with pytest.raises(DataError, match="label value") as raised:
        trainer.train(2)
    assert len(str(raised.value)) < 500
    weights = np.ones(len(LABELS), np.float32)
    weights[100] = -1
    stream = tf.data.Dataset.from_tensor_slices((IMAGES, LABELS, weights))
    with pytest.raises(DataError, match="'weight' must be a finite number"):
        make_trainer(make_strategy("one_device", 1), stream).train(10)


def test_evaluation_data_must_have_the_same_features():
    strategy = make_strategy("one_device", 1)
    with strategy.scope():
        task, optimizer = WordBag(), keras.optimizers.SGD(0.1)
    data = {"words": np.zeros([8, 4], "int64"), "target": np.zeros(8)}
    with pytest.raises(DataError, match="'target' .*missing from the evaluation data"):
        ddl.Trainer(task, optimizer, data, eval_data={"words": data["words"]}, global_batch_size=4)


def test_weights_that_are_not_finite_are_named():
    trainer = make_trainer(make_strategy("mirrored", 2))
    trainer.check_finite()
    trainer.model.trainable_variables[-1].assign([0.0, np.inf])
    with pytest.raises(TrainingDiverged, match="logits/bias is not finite"):
        trainer.check_finite()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch": 32.0}, "global_batch_size must be an integer of at least 1, got 32.0"),
        ({"batch": 30}, "4 replicas.* got 30. Use 28 or 32"),
        ({"clip_norm": 0.0}, "clip_norm must be greater than 0, .* got 0.0"),
        ({"batch": 3}, "batch size .* got 3. Use 4"),
        ({"accumulation_steps": 3}, "4 replicas × 3 accumulation steps.*24 or 36"),
        ({"accumulation_steps": 0}, "accumulation_steps must be .* got 0"),
        ({"max_skipped_updates": 0}, "max_skipped_updates must be at least 1, got 0"),
        ({"max_skipped_updates": "3"}, "max_skipped_updates must be an integer, got '3'"),
        ({"clip_norm": "1"}, "clip_norm must be a number, or None, got '1'"),
        ({"shuffle": "no"}, "shuffle must be True or False, got 'no'"),
        ({"data_on_device": "no"}, "data_on_device must be True, False or 'auto', got 'no'"),
        ({"loss_scale": 1024.0}, "a LossScale, 'auto' or None, got 1024.0. Pass ddl.LossScale"),
        ({"weight_average": 0.99}, "or None, got 0.99. Pass ddl.ExponentialMovingAverage"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ConfigError, match=message):
        make_trainer(make_strategy("mirrored", 4), **arguments)


def test_nothing_to_evaluate_on():
    strategy = make_strategy("one_device", 1)
    with strategy.scope():
        task = ddl.Classification(ddl.models.mlp((6, 6, 1), 2))
        trainer = ddl.Trainer(task, keras.optimizers.SGD(0.1), DATA, global_batch_size=8)
    with pytest.raises(ConfigError, match="eval_data"):
        trainer.evaluate()


def test_wrong_arguments_of_a_method_are_an_error():
    trainer = make_trainer(make_strategy("one_device", 1))
    for method in ("evaluate", "predict"):
        with pytest.raises(ConfigError, match=rf"{method} takes one data set, .*{method}\(\(x, y"):
            getattr(trainer, method)(IMAGES, LABELS)
        with pytest.raises(ConfigError, match=f"{method} takes a data set, got False"):
            getattr(trainer, method)(False)
    with pytest.raises(ConfigError, match="averaged must be True or False"):
        trainer.evaluate(averaged=DATA)
    with pytest.raises(ConfigError, match=r"Each action must be callable .* got 'image'"):
        trainer.train(1, DATA)
    for steps in (-1, 2.5, True, DATA):
        with pytest.raises(ConfigError, match="steps must be an integer of at least 0, got"):
            trainer.train(steps)
    for name, message in (
        ("fit", r"ddl\.fit\(trainer, train_epochs=5"),
        ("fitt", "no attribute 'fitt'"),
    ):
        with pytest.raises(AttributeError, match=message):
            getattr(trainer, name)
    for length in ({}, {"steps": 2, "epochs": 1}):
        with pytest.raises(ConfigError, match="train needs a length, in steps or in epochs, got"):
            trainer.train(**length)
    for epochs in (-1, float("inf"), "2", True):
        with pytest.raises(ConfigError, match="epochs must be"):
            trainer.train(epochs=epochs)


def test_a_variable_that_the_loss_does_not_see():
    inputs = keras.Input((6, 6, 1), name="image")
    logits = keras.layers.Dense(2)(keras.layers.Flatten()(inputs))

    class Idle(keras.layers.Layer):
        def build(self, shape):
            self.extra = self.add_weight(name="extra", shape=(1,))

        def call(self, x):
            return x

    task = ddl.Classification(keras.Model(inputs, Idle(name="idle")(logits)))
    trainer = ddl.Trainer(task, keras.optimizers.SGD(0.1), DATA, global_batch_size=8)
    with pytest.raises(ConfigError, match="does not depend on .*idle/extra"):
        trainer.train(1)


def test_schedules_move_once_an_update():
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([1, 2], [0.3, 0.2, 0.1])
    trainer = make_trainer(make_strategy("mirrored", 2), accumulation_steps=2, schedule=schedule)
    rates = []
    for step in range(1, 5):
        trainer.train(1)
        rates.append(round(trainer.learning_rate, 6))
        assert (trainer.step, int(trainer.optimizer.iterations.numpy())) == (step, step)
    assert rates == [0.3, 0.3, 0.2, 0.1]


class ReducesInTraining(keras.layers.Layer):
    """Asks for its replica, as a normalization over all replicas does."""

    def call(self, x, training=False):
        if training:
            replica = tf.distribute.get_replica_context()
            x += 0 * replica.all_reduce("SUM", tf.reduce_mean(x))
        return x


class BySplit:
    """A task whose figures differ between training and evaluation."""

    def __init__(self):
        layers = [
            keras.layers.Flatten(),
            keras.layers.Dense(4),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.1),
            ReducesInTraining(),
            keras.layers.Dense(2),
        ]
        self.model = keras.Sequential([keras.Input((6, 6, 1)), *layers])

    def per_example(self, features, training):
        logits = self.model(tf.cast(features["image"], tf.float32), training=training)
        loss = tf.nn.sparse_softmax_cross_entropy_with_logits(features["label"], logits)
        ones = tf.ones_like(loss)
        names = {"both": ones}
        names |= {"noise": 2 * ones, "more": 4 * ones} if training else {"held_out": 3 * ones}
        return ddl.PerExample(loss, names)


def test_each_split_reports_its_own_figures():
    strategy = make_strategy("mirrored", 2)
    with strategy.scope():
        task, optimizer = BySplit(), keras.optimizers.SGD(0.01)
    trainer = ddl.Trainer(
        task, optimizer, DATA, eval_data=DATA, global_batch_size=32, strategy=strategy
    )
    assert trainer.metric_names == ("loss", "both", "noise", "more")
    assert trainer.eval_metric_names == ("loss", "both", "held_out")
    trained, evaluated = trainer.train(3), trainer.evaluate()
    assert np.isfinite([trained.pop("loss"), evaluated.pop("loss")]).all()
    assert trained == {"both": 1, "noise": 2, "more": 4}
    assert evaluated == {"both": 1, "held_out": 3}
    assert trainer.trace_count == 1
