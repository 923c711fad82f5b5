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


class Smoothed(ddl.Classification):
    """A task of one's own, which adds an argument to ddl's."""

    def __init__(self, model, scale, history=None):
        super().__init__(model, label_smoothing=0.1)
        self.scale = scale
        self.history = history or []
        self.calls = 0
        self.shift = np.zeros(2)
        self.best = 0.0  # nobody reads it

    def per_example(self, features, training):
        self.calls += 1
        output = super().per_example(features, training)
        return output._replace(loss=self.shifted(self.scale * output.loss))

    def shifted(self, loss):
        return loss + self.shift[0]

    def predict(self, features):
        return tf.ones_like(features["image"])


@pytest.fixture
def trainer():
    strategy = make_strategy("one_device", 1)
    with strategy.scope():
        layers = [
            keras.layers.Dense(4, name="hidden", kernel_regularizer=keras.regularizers.L2(0.1)),
            ddl.layers.Dropout(0.5, name="dropout"),
            keras.layers.Dense(2, name="logits"),
        ]
        own = type("Smoothed", (Smoothed,), {})  # for this test, which may change it
        task = own(keras.Sequential([keras.Input((3,)), *layers]), 2.0)
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


@pytest.mark.parametrize("trains_before", [False, True])
@pytest.mark.parametrize("frozen", ["hidden", "dropout"])
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
    with pytest.raises(ConfigError, match="list of the model's trainable variables"):
        trainer.train(1)


def replace(trainer, name, function):
    """Replaces a method in the class of the task, as IPython's %autoreload does."""
    setattr(type(trainer.task), name, function)


CHANGES = {
    "rate of layer 'dropout'": lambda t: setattr(t.model.get_layer("dropout"), "rate", 0.1),
    "activation of layer 'hidden'": lambda t: setattr(
        t.model.get_layer("hidden"), "activation", keras.activations.relu
    ),
    "scale of the task": lambda t: setattr(t.task, "scale", 3.0),
    "shift of the task": lambda t: setattr(t.task, "shift", np.ones(2)),
    "shift of": lambda t: t.task.shift.__setitem__(0, 1.0),
    "top_k of the task": lambda t: setattr(t.task, "top_k", 1),
    "per_example of the task": lambda t: replace(t, "per_example", lambda s, f, training: None),
    "shifted of the task": lambda t: replace(t, "shifted", lambda s, loss: loss),
    "label_smoothing of the task": lambda t: setattr(t.task, "_label_smoothing", 0.0),
    "augmentations of the task": lambda t: setattr(t.task, "_augmentations", (tf.identity,)),
    "momentum of the optimizer": lambda t: setattr(t.optimizer, "momentum", 0.5),
    "weight_decay of the optimizer": lambda t: setattr(t.optimizer, "weight_decay", 0.5),
    "learning_rate of the optimizer": lambda t: setattr(
        t.optimizer, "learning_rate", K.schedules.CosineDecay(0.1, 10)
    ),
    "the regularizer of": lambda t: setattr(t.model.weights[0], "regularizer", None),
}


@pytest.mark.parametrize("place", CHANGES)
def test_what_was_traced_is_fixed(trainer, place):
    trainer.train(1)
    CHANGES[place](trainer)
    with pytest.raises(ConfigError, match=rf"{place}.* was .* when the loop was traced"):
        trainer.train(1)


def test_an_array_of_equal_values_is_no_change(trainer):
    """keras.layers.Normalization makes its moments anew when a checkpoint is restored."""
    trainer.task.scale = tf.constant([2.0])
    trainer.train(1)
    trainer.task.scale = tf.constant([2.0])
    trainer.task.shift = np.zeros(2)
    trainer.task.best, trainer.task.calls = 0.5, 0  # not read, and changed by the trace itself
    trainer.train(1)
    for other in (tf.constant([2.5]), tf.constant([2.0], tf.float64), tf.constant([2.0, 2.0])):
        trainer.task.scale = other
        with pytest.raises(ConfigError, match="Changing scale of the task has no effect"):
            trainer.train(1)


def test_changes_by_an_action_are_found_before_the_next_loop(trainer):
    def change(step):
        trainer.model.get_layer("dropout").rate = 0.1

    with pytest.raises(ConfigError, match="rate of layer 'dropout'"):
        trainer.train(4, [EachLoop(change)])


def test_changes_before_the_trace_take_effect(trainer):
    """As a range test gives the optimizer a schedule."""
    schedule = K.schedules.PiecewiseConstantDecay([0], [0.5, 0.25])
    trainer.evaluate()
    trainer.optimizer.learning_rate = schedule
    trainer.train(2)
    assert trainer.learning_rate == 0.25
    schedule.values[1] = 0.125
    with pytest.raises(ConfigError, match="values of the PiecewiseConstantDecay"):
        trainer.train(1)


def test_an_evaluation_has_read_the_task(trainer):
    before = trainer.evaluate()
    trainer.task.scale = 4.0
    with pytest.raises(ConfigError, match="scale of the task .* it was 2.0"):
        trainer.evaluate()
    trainer.task.scale = 2.0
    assert trainer.evaluate() == before


def test_a_replaced_method_is_taken_by_no_call_or_by_all(trainer):
    trainer.train(1)
    before = trainer.evaluate(DATA), trainer.predict(DATA)
    replace(trainer, "predict", lambda self, features: 2 * tf.ones_like(features["image"]))
    np.testing.assert_array_equal(trainer.predict(DATA), 2 * before[1])
    trainer.train(1)
    replace(trainer, "shifted", lambda self, loss: 1000 * loss)
    for call in (lambda: trainer.evaluate(DATA), trainer.evaluate, lambda: trainer.train(1)):
        with pytest.raises(ConfigError, match=r"shifted of the task .* it was the code at"):
            call()
    delattr(type(trainer.task), "shifted")
    assert trainer.evaluate(DATA).keys() == before[0].keys()


def test_an_argument_that_is_set_on_a_task_of_ddl_is_refused():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, "softmax")])
    task = ddl.Supervised(model, "sparse_categorical_crossentropy")

    def made():
        return ddl.Trainer(task, "sgd", DATA, eval_data=DATA, global_batch_size=4)

    trainer = made()
    for name in ("class_weight", "metrics", "loss"):
        setattr(task, name, "mse")
        for call in (lambda: trainer.train(1), trainer.evaluate, made):
            with pytest.raises(ConfigError, match=f"Setting {name} of a Supervised has no effect"):
                call()
        delattr(task, name)
    task.note = "of the user's"
    trainer.evaluate()


def test_an_argument_of_the_optimizer_that_is_set_later_is_refused(trainer):
    trainer.optimizer.clipnorm = 1.0
    with pytest.raises(ConfigError, match="clip_norm"):
        trainer.train(1)
    trainer.optimizer.clipnorm, trainer.optimizer.lr = None, 0.01
    with pytest.raises(ConfigError, match="Setting lr .* Assign to its learning_rate"):
        trainer.train(1)


def test_a_rate_that_is_a_number_can_be_changed(trainer):
    weight = trainer.model.trainable_variables[-1]
    trainer.train(1)
    trainer.optimizer.momentum, before = 0.9, weight.numpy()  # the same again
    trainer.optimizer.learning_rate = 0.0
    trainer.optimizer.variables[-1].assign(tf.zeros_like(weight.value))
    trainer.train(1)
    assert trainer.learning_rate == 0.0
    np.testing.assert_array_equal(weight.numpy(), before)


def test_a_record_of_the_task_is_no_setting(trainer):
    trainer.train(1)
    trainer.task.history.append(1)
    trainer.train(1)
