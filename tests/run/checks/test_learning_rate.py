import keras
import pytest
import tensorflow as tf
from ddl.run.checks.learning_rate import learning_rate_summary
from keras.optimizers import schedules

from ddl.errors import ConfigError
from ddl.optimizers import LAMB, LARS, MomentumSGD
from ddl.optimizers.learning_rate import LearningRate
from ddl.optimizers.plateau import ReduceOnPlateau


def test_the_summary_shows_what_was_resolved():
    rate = LearningRate(
        schedules.CosineDecay(0.1, 90),
        scaling="linear",
        base_batch_size=256,
        global_batch_size=8192,
        warmup_steps=10,
        warmup_start=1 / 32,
    )
    assert learning_rate_summary(keras.optimizers.SGD(rate), 100) == {
        "learning rate": "3.2 at its peak, 0.000974677 at the end",
        "base learning rate": "0.1",
        "learning rate scaling": "× 32 (linear, from batch size 256 to 8,192)",
        "warm-up": "gradual, 10 updates from 0.1",
    }
    assert learning_rate_summary(keras.optimizers.SGD(0.1), 100) == {
        "learning rate": "0.1 at its peak"
    }


def test_the_summary_is_computed_on_the_host(monkeypatch):
    """A thousand turns of a loop on a GPU would each wait for the host."""
    devices = []

    def rates(optimizer, steps):
        devices.append(tf.constant(0.0).device)
        return dict.fromkeys(steps, 0.1)

    monkeypatch.setattr("ddl.run.checks.learning_rate._learning_rates_at", rates)
    with tf.device("CPU:1"):
        learning_rate_summary(keras.optimizers.SGD(0.1), 100)
    assert [name.endswith("CPU:0") for name in devices] == [True]


@pytest.mark.parametrize("steps", [1, 1999, 100_001])
def test_a_thousand_steps_are_looked_at_in_one_trace(steps):
    calls = []

    class Counted(schedules.LearningRateSchedule):
        def __call__(self, step):
            calls.append(step)
            return tf.where(step == steps - 1, 0.25, 0.5)

    reported = learning_rate_summary(keras.optimizers.SGD(Counted()), steps)
    assert reported["learning rate"].startswith("0.5 at" if steps > 1 else "0.25 at")
    assert len(calls) == 1


def test_a_function_is_asked_for_its_rate():
    for optimizer in (keras.optimizers.SGD, LARS, LAMB, MomentumSGD):
        assert learning_rate_summary(optimizer(lambda: 0.25), 100) == {
            "learning rate": "0.25 at its peak"
        }


@pytest.mark.parametrize(
    ("learning_rate", "message"),
    [
        (
            LearningRate(0.1, warmup_steps=100),
            "shorter than the run of 100 updates, got 100 warm-up",
        ),
        (schedules.PolynomialDecay(0.1, 50, -0.1), "at least 0, got -0.00.* at update 26"),
        (
            schedules.ExponentialDecay(1.0, 1, 1e9),
            "must be finite and at least 0, got inf at update 5",
        ),
        (0.0, "The peak learning rate must be greater than 0, got 0"),
    ],
    ids=["warm-up", "negative", "infinite", "zero"],
)
def test_a_run_refuses(learning_rate, message):
    with pytest.raises(ConfigError, match=message):
        learning_rate_summary(keras.optimizers.SGD(learning_rate), 100)


def test_the_summary_shows_a_plateau():
    plateau = ReduceOnPlateau(LearningRate(0.1, warmup_steps=10), "accuracy", factor=0.2)
    reported = learning_rate_summary(keras.optimizers.SGD(plateau), 100)
    assert reported["on a plateau"] == "× 0.2 after 3 evaluations without a better accuracy"
    assert reported["warm-up"] == "gradual, 10 updates from 0"
    with pytest.raises(ConfigError, match="the run of 9 updates, got 10 warm-up updates"):
        learning_rate_summary(keras.optimizers.SGD(plateau), 9)
