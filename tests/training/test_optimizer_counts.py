"""Learning rates and counts of several optimizers, at steps that depend on a tensor too."""

import keras
import pytest

from ddl.errors import ConfigError
from tests.conftest import make_strategy
from tests.step.verbs.own_steps import build


def halving(rate):
    return keras.optimizers.schedules.ExponentialDecay(rate, 1, 0.5)


def test_each_optimizer_counts_its_own_updates():
    """The discriminator makes three updates a step, the generator one in each even step."""
    trainer = build("Critic", make_strategy("one_device", 1))
    optimizers = trainer.optimizer
    for name, rate in (("generator", 1.0), ("discriminator", 1.0)):
        optimizers[name].learning_rate = halving(rate)
    assert set(trainer.learning_rates.values()) == {1.0}  # of the first update
    trainer.train(3)
    counts = {name: int(one.iterations.numpy()) for name, one in optimizers.items()}
    assert counts == {"generator": 2, "discriminator": 9}
    assert trainer.learning_rates == {
        "learning_rate/generator": 0.5,
        "learning_rate/discriminator": 0.5**8,
    }


def test_an_optimizer_used_elsewhere_is_noticed():
    trainer = build("Gan", make_strategy("one_device", 1))
    trainer.optimizer["generator"].iterations.assign(2)
    with pytest.raises(ConfigError, match="iterations must equal the Trainer's step"):
        trainer.train(1)


def test_one_learning_rate_of_several_is_ambiguous():
    trainer = build("Gan", make_strategy("one_device", 1))
    message = "with one optimizer, got generator, discriminator. Read trainer.learning_rates"
    with pytest.raises(ConfigError, match=message):
        _ = trainer.learning_rate
