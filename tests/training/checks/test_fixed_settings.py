import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.errors import ConfigError
from ddl.training.actions import EachLoop
from tests.conftest import make_strategy

K = keras.optimizers
DATA = {"image": np.ones((8, 3), "f4"), "label": np.arange(8) % 2}


@pytest.fixture
def trainer():
    strategy = make_strategy("one_device", 1)
    with strategy.scope():
        layers = [
            keras.layers.Dense(4, name="hidden"),
            keras.layers.Dropout(0.5, name="dropout"),
            keras.layers.Dense(2, name="logits"),
        ]
        task = ddl.Classification(keras.Sequential([keras.Input((3,)), *layers]))
        return ddl.Trainer(
            task,
            K.SGD(0.1, momentum=0.9),
            DATA,
            eval_data=DATA,
            global_batch_size=4,
            strategy=strategy,
        )


FIXED = ["optimizer", "model", "task", "strategy", "global_batch_size", "accumulation_steps"]
FIXED += ["num_examples", "steps_per_epoch", "has_eval_data", "metric_names", "averages", "pace"]
ARGUMENTS = ["clip_norm", "eval_data", "train_data", "seed", "shuffle", "weight_average"]


def test_attributes_of_a_trainer_are_fixed(trainer):
    for name in [*FIXED, *ARGUMENTS]:
        before = getattr(trainer, name, None)
        with pytest.raises(ConfigError, match=rf"trainer\.{name} cannot be .*Create a new Trainer"):
            setattr(trainer, name, None)
        assert getattr(trainer, name, None) is before


def test_the_error_says_what_takes_effect(trainer):
    with pytest.raises(ConfigError, match=r"trainer\.optimizer\.learning_rate"):
        trainer.learning_rate = 0.5


def test_an_attribute_that_there_is_not_is_an_error(trainer):
    with pytest.raises(ConfigError, match=r"no attribute 'clip_nrom'.*clip_norm"):
        trainer.clip_nrom = 1.0


def test_a_subclass_has_attributes_of_its_own_and_a_method_can_be_replaced(trainer):
    class Own(ddl.Trainer):
        def __init__(self, *args, **kwargs):
            self.counter = 0
            super().__init__(*args, **kwargs)
            self.note = "mine"

    with trainer.strategy.scope():
        own = Own(trainer.task, K.SGD(0.1), DATA, global_batch_size=4)
    own.note = "changed"
    own.counter += 1
    with pytest.raises(ConfigError, match=r"trainer\.optimizer cannot be changed"):
        own.optimizer = None
    trainer.evaluate = lambda: {"loss": 0.0}
    assert trainer.evaluate() == {"loss": 0.0}


@pytest.mark.parametrize(("trains_before", "frozen"), [(False, "dropout"), (True, "hidden")])
def test_trainable_is_fixed_when_the_trainer_is_made(trainer, trains_before, frozen):
    if trains_before:
        trainer.train(1)
    trainer.model.get_layer(frozen).trainable = False
    message = (
        rf"trainable of layer '{frozen}' has no effect: it was True when the trainer was created, "
        "and is now False"
    )
    with pytest.raises(ConfigError, match=message):
        trainer.train(1)
    trainer.model.get_layer(frozen).trainable = True
    trainer.train(1)


def test_layers_that_come_later_are_an_error(trainer):
    trainer.model.add(keras.layers.Dense(2, name="more"))
    with pytest.raises(ConfigError, match=r"list of trainable variables of task\.model"):
        trainer.train(1)


def test_a_choice_that_an_action_changes_is_found_before_the_next_loop(trainer):
    def freeze(step):
        trainer.model.get_layer("hidden").trainable = False

    with pytest.raises(ConfigError, match="trainable of layer 'hidden'"):
        trainer.train(4, [EachLoop(freeze)])


def test_a_rate_that_is_a_number_can_be_changed(trainer):
    weight = trainer.model.trainable_variables[-1]
    trainer.train(1)
    trainer.optimizer.learning_rate = 0.0
    trainer.optimizer.variables[-1].assign(tf.zeros_like(weight.value))
    before = weight.numpy()
    trainer.train(1)
    assert trainer.learning_rate == 0.0
    np.testing.assert_array_equal(weight.numpy(), before)
