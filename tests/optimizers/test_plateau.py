"""The rule of ReduceOnPlateau, and that a run with one goes on to the same bits."""

import functools
import itertools
from types import SimpleNamespace

import keras
import numpy as np
import pytest

import ddl
from ddl.checkpoints.checkpoints import Checkpoints
from ddl.errors import ConfigError, TrainingDiverged
from ddl.optimizers.learning_rate import LearningRate
from ddl.optimizers.plateau import ReduceOnPlateau, plateau_of
from ddl.precision import set_precision
from ddl.run.checks.learning_rate import check_plateau
from ddl.run.console import RunConsole
from ddl.run.loop import OuterLoop
from ddl.run.plan import RunPlan
from ddl.run.writers import JsonLinesWriter, Writers
from ddl.signals import StopSignals
from tests.conftest import for_each_kind_on_two, make_strategy
from tests.optimizers.test_learning_rate import constant_gradient, rates_of
from tests.run.test_loop import lines, weights
from tests.training.rewinding import Start

# Evaluations at steps 2, 4, …; with a patience of 2 and a cooldown of 2 the rate is reduced at 8,
# not at 12, where one of the two came in the cooldown, but at 14, and at 20.
LOSSES = [1.0, 0.5, 0.6, 0.7, 0.8, 0.55, 0.9, 0.4, 0.4, 0.4]
REDUCED = {8: 1, 14: 2}
STEPS = 20


def rule(**arguments):
    return ReduceOnPlateau(
        **{"schedule": 1.0, "factor": 0.5, "patience": 2, "cooldown": 2} | arguments
    )


def reductions(plateau, values):
    return [n for n, value in enumerate(values, start=1) if plateau.observe(2 * n, value)]


def test_the_rule():
    plateau = rule()
    assert reductions(plateau, LOSSES) == [4, 7, 10]
    assert float(plateau(19)) == 0.25  # as used
    assert float(plateau(20)) == 0.125
    assert reductions(rule(cooldown=0), LOSSES) == [4, 6, 10]
    assert reductions(rule(patience=1, cooldown=0), LOSSES[:5]) == [3, 4, 5]
    assert reductions(rule(min_delta=0.1), [1.0, 0.95, 0.91, 0.9, 0.89]) == [3]
    assert reductions(rule(metric="accuracy"), [0.5, 0.6, 0.5, 0.55]) == [4]
    assert reductions(rule(metric="accuracy", mode="min"), [0.5, 0.6, 0.5]) == [3]
    assert reductions(rule(metric="far_off", mode="min"), [0.5, 0.6, 0.5]) == [3]
    assert reductions(rule(metric="accuracy"), [float("nan"), 0.6, 0.5, 0.7]) == []


def test_the_rule_is_that_of_keras():
    random = np.random.default_rng(0)
    every = itertools.product(range(1, 4), range(5), [0.0, 0.1], [0.0, 0.2])
    for patience, cooldown, min_delta, least in every:
        arguments = {"factor": 0.5, "patience": patience, "cooldown": cooldown}
        callback = keras.callbacks.ReduceLROnPlateau(
            "loss", mode="min", min_delta=min_delta, min_lr=least, **arguments
        )
        optimizer = SimpleNamespace(learning_rate=1.0)
        callback.set_model(SimpleNamespace(optimizer=optimizer))
        callback.on_train_begin()
        ours = ReduceOnPlateau(1.0, min_delta=min_delta, min_share=least, **arguments)
        for step, value in enumerate(random.integers(0, 6, 16) / 5, start=1):
            ours.observe(step, value)
            callback.on_epoch_end(step, {"loss": value})
            assert float(ours(step)) == pytest.approx(optimizer.learning_rate), (arguments, step)


def test_it_is_never_less_than_its_least_share():
    plateau = rule(patience=1, cooldown=0, min_share=0.2)
    assert reductions(plateau, [1.0] * 9) == [2, 3, 4]
    assert float(plateau(99)) == 0.2


def test_it_reduces_any_schedule():
    schedule = keras.optimizers.schedules.CosineDecay(0.3, 40)
    for inner in (schedule, LearningRate(schedule, warmup_steps=4)):
        plateau = rule(schedule=inner)
        plateau.observe(2, 1.0)
        plateau.observe(4, 1.0)
        assert plateau.observe(6, 1.0)
        expected = [float(LearningRate(schedule)(s)) for s in range(20)]
        if inner is not schedule:
            expected = [float(inner(s)) for s in range(20)]
        shares = [1.0] * 6 + [0.5] * 14
        ours = [float(plateau(s)) for s in range(20)]
        np.testing.assert_allclose(ours, np.multiply(expected, shares), rtol=1e-12)


def test_it_is_saved_and_read_as_it_began():
    plateau = rule(schedule=LearningRate(0.3, warmup_steps=4), metric="accuracy")
    reductions(plateau, [1.0] * 5)
    serialized = keras.optimizers.serialize(keras.optimizers.SGD(plateau))
    again = plateau_of(keras.optimizers.deserialize(serialized))
    assert again.get_config() == plateau.get_config()
    assert float(again(9)) == 0.3


@for_each_kind_on_two
def test_a_compiled_loop_follows(strategy):
    trainer, weight = constant_gradient(lambda: keras.optimizers.SGD(rule()), strategy)
    rates = rates_of(trainer, 4)
    plateau = plateau_of(trainer.optimizer)
    assert reductions(plateau, [1.0] * 3) == [3]
    trainer.train(1)
    assert trainer.learning_rate == 1.0  # the fifth update: the reduction is told for the sixth on
    rates += [1.0, *rates_of(trainer, 3)]
    assert rates == [1.0] * 6 + [0.5] * 2
    assert float(weight[0, 0]) == -7.0
    assert trainer.trace_count == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"factor": 1.0}, "factor must be between 0 and 1, both excluded, got 1.0"),
        ({"factor": -0.1}, "factor must be between 0 and 1, both excluded, got -0.1"),
        ({"patience": 0}, "patience must be at least 1, got 0"),
        ({"cooldown": -1}, "cooldown must be at least 0, got -1"),
        ({"min_delta": -1.0}, "min_delta must be at least 0, got -1.0"),
        ({"min_share": 1.0}, "min_share must be at least 0 and below 1, got 1.0"),
        ({"schedule": -1.0}, "learning rate .* must be greater than 0, got -1"),
        ({"mode": "lowest"}, "must be 'max' or 'min', got 'lowest'"),
        ({"metric": "far_off"}, "Set ReduceOnPlateau.mode = 'max' or 'min'"),
    ],
)
def test_refuses(arguments, message):
    with pytest.raises(ConfigError, match=message):
        rule(**arguments)


def test_it_stands_outermost():
    with pytest.raises(ConfigError, match="ReduceOnPlateau must wrap LearningRate"):
        LearningRate(rule())


def test_what_a_run_must_have():
    plan = RunPlan(train_steps=5, eval_every=2)
    check_plateau(rule(), plan, ("loss",), True)
    with pytest.raises(ConfigError, match=r"of the evaluation \(accuracy, f1\), got 'loss'"):
        check_plateau(rule(), plan, ("accuracy", "f1"), True)
    with pytest.raises(ConfigError, match="--mode=train_and_eval"):
        check_plateau(rule(), plan, ("loss",), False)
    with pytest.raises(ConfigError, match="EVAL_EVERY is None. Set EVAL_EVERY"):
        check_plateau(rule(), RunPlan(train_steps=5), ("loss",), True)


# ------------------------------------------------------------ whole runs


def make_trainer(seed=0):
    set_precision("float32")
    keras.utils.set_random_seed(seed)
    data = {
        "image": np.random.default_rng(0).normal(size=(160, 4)).astype("f4"),
        "label": np.arange(160) % 2,
    }
    with make_strategy("mirrored", 2).scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        return ddl.Trainer(
            ddl.Classification(model),
            keras.optimizers.SGD(rule(schedule=LearningRate(0.1, warmup_steps=3)), momentum=0.9),
            data,
            eval_data=data,
            global_batch_size=8,
        )


@functools.cache
def _start():
    trainer = make_trainer()
    return Start(trainer, plateau_of(trainer.optimizer).state.values())


def made_again(seed=0):
    """Returns one traced trainer at its start, with other weights for another seed."""
    trainer = _start().again()
    for variable in trainer.model.variables:
        variable.assign(variable + float(seed))
    return trainer


def run(folder, trainer, until=STEPS, diverges_at=None, **plan):
    """Like ddl.run.train; evaluations give LOSSES."""
    plan = RunPlan(
        **{"train_steps": until, "eval_every": 2, "log_every": 1, "checkpoint_every": 3, **plan}
    )
    diverges = [] if diverges_at is None else [diverges_at]

    def evaluate():
        if trainer.step in diverges:
            diverges.clear()
            raise TrainingDiverged("as if")
        return {"loss": LOSSES[trainer.step // 2 - 1]}

    trainer.evaluate = evaluate
    console = RunConsole()
    told = []
    console.line = told.append
    json_lines = JsonLinesWriter(folder / "metrics.jsonl", told.append)
    checkpoints = Checkpoints(folder / "checkpoints", trainer, report=told.append)
    checkpoints.restore_latest()
    folder.mkdir(exist_ok=True)
    writers = Writers([json_lines, console])
    writers.drop_after(trainer.step)
    with StopSignals(trainer.request_stop) as stop:
        OuterLoop(trainer, plan, checkpoints, writers, console, stop, True).run()
    return trainer, told


def state(trainer):
    return {name: v.numpy() for name, v in plateau_of(trainer.optimizer).state.items()}


def assert_same(ours, theirs):
    assert state(ours) == state(theirs)
    for value, reference in zip(weights(ours), weights(theirs), strict=True):
        np.testing.assert_array_equal(value, reference)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    folder = tmp_path_factory.mktemp("straight")
    return *run(folder, make_trainer()), lines(folder)


def test_the_rate_of_each_update_is_logged(straight):
    trainer, told, logged = straight
    expected = [0.1 * min(s / 3, 1) for s in range(STEPS)]
    for step, count in REDUCED.items():
        expected[step:] = [0.1 * 0.5**count] * (STEPS - step)
    np.testing.assert_allclose([line["learning_rate"] for line in logged], expected, rtol=1e-7)
    assert state(trainer)["reductions"] == 3  # the last one for what may follow
    reduced = [
        text for text in told if text.startswith("Step 8: loss 0.7 does not improve on 0.5.")
    ]
    assert len(reduced) == 1
    assert reduced[0].endswith("The learning rate is reduced to 0.05.")


@pytest.mark.parametrize("stops", [(1, 5, 8), (9, 14, 17)], ids=str)
def test_a_run_goes_on_to_the_same_bits(straight, stops, tmp_path):
    """Also where it had an evaluation only because it ended there, which tells it nothing."""
    for number, stop in enumerate((*stops, STEPS)):
        trainer, _ = run(tmp_path, made_again(seed=number), until=stop)
    assert_same(trainer, straight[0])
    assert lines(tmp_path) == straight[2]


@pytest.mark.parametrize(
    ("name", "stop"),
    [("best", 6), ("not_better", 6), ("cooling_down", 8), ("reductions", 8), ("reduced_at", 8)],
)
def test_each_part_of_the_state_counts(straight, name, stop, tmp_path, monkeypatch):
    run(tmp_path, made_again(), until=stop)
    restore = Checkpoints.restore_latest

    def forgetful(self, **arguments):
        variable = plateau_of(self._trainer.optimizer).state[name]
        before = variable.read_value()
        restore(self, **arguments)
        variable.assign(before)

    monkeypatch.setattr(Checkpoints, "restore_latest", forgetful)
    trainer = made_again()
    Checkpoints(tmp_path / "checkpoints", trainer).restore_latest()
    used = trainer.learning_rate
    trainer, _ = run(tmp_path, trainer)
    same_weights = map(np.array_equal, weights(trainer), weights(straight[0]))
    assert not all(same_weights) or used != pytest.approx(0.1)


def test_it_goes_back_with_the_run(straight, tmp_path):
    """What evaluations told after the checkpoint gone back to is forgotten, and told again."""
    trainer, _ = run(tmp_path, made_again(), diverges_at=10, on_divergence="rewind")
    assert int(trainer.state.rewinds) == 1
    assert state(trainer) == state(straight[0])
