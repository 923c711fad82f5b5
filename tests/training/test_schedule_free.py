"""What a schedule-free optimizer evaluates, exports and saves."""

import keras
import numpy as np
import pytest

import ddl
from ddl.errors import ConfigError, ModelDirectoryError
from ddl.optimizers import AdamWScheduleFree
from ddl.precision import set_precision
from tests.conftest import make_strategy
from tests.step.verbs.own_steps import Grouped, data


def build(strategy, **arguments):
    set_precision("float64")
    keras.utils.set_random_seed(7)
    with strategy.scope():
        return ddl.Trainer(
            Grouped(),
            AdamWScheduleFree(0.05, beta_1=0.8, weight_decay=0.01),
            data(48),
            eval_data=data(20),
            global_batch_size=16,
            strategy=strategy,
            seed=3,
            **arguments,
        )


def test_evaluates_the_mean_of_the_plain_steps():
    """With constant weights of the average, x is the mean of all z so far."""
    trainer = build(make_strategy("mirrored", 2))
    optimizer = trainer.optimizer
    assert optimizer._momentums  # a name that is private to Keras
    means = [np.zeros(v.shape) for v in trainer.model.trainable_variables]
    for step in range(1, 6):
        trainer.train(1)
        for mean, z in zip(means, optimizer._momentums, strict=True):
            mean += (z.numpy() - mean) / step
    own = [v.numpy() for v in trainer.model.trainable_variables]
    with trainer.evaluation_weights():
        for variable, mean in zip(trainer.model.trainable_variables, means, strict=True):
            for copy in trainer.strategy.experimental_local_results(variable.value):
                np.testing.assert_allclose(copy.numpy(), mean, rtol=0, atol=1e-12)
    for variable, was in zip(trainer.model.trainable_variables, own, strict=True):
        np.testing.assert_array_equal(variable.numpy(), was)
    assert trainer.evaluate()["loss"] != trainer.evaluate(averaged=False)["loss"]


def test_a_checkpoint_for_evaluation_holds_what_it_needs(tmp_path):
    trainer = build(make_strategy("mirrored", 2))
    trainer.train(4)
    figures = trainer.evaluate()
    checkpoints = ddl.Checkpoints(tmp_path, trainer)
    checkpoints.save()
    checkpoints.finish()
    other = build(make_strategy("one_device", 1))
    ddl.Checkpoints(tmp_path, other).restore_model()
    assert other.evaluate() == pytest.approx(figures, abs=1e-12)
    resumed = build(make_strategy("mirrored", 2))
    ddl.Checkpoints(tmp_path, resumed).restore_latest()
    for each in (trainer, resumed):
        each.train(3)
    assert resumed.evaluate() == trainer.evaluate()


def test_after_a_warm_start_the_average_begins_at_the_new_weights():
    trainer = build(make_strategy("mirrored", 2))
    for variable in trainer.model.trainable_variables:
        variable.assign(variable.numpy() + 1)
    trainer.schedule_free.reset()
    own = [v.numpy() for v in trainer.model.trainable_variables]
    with trainer.evaluation_weights():
        for variable, was in zip(trainer.model.trainable_variables, own, strict=True):
            np.testing.assert_allclose(variable.numpy(), was, rtol=0, atol=1e-12)


def test_refuses_a_second_average():
    with pytest.raises(ConfigError, match="averages the weights itself"):
        build(make_strategy("one_device", 1), weight_average=ddl.ExponentialMovingAverage())


@pytest.mark.parametrize("what", ["constraint", "average", "parts", "shared"])
def test_refuses_what_would_leave_the_average_undefined(what):
    set_precision("float64")

    class Task(Grouped):
        def step(self, update, batch):
            gradients = update.gradients(self.per_example, batch)
            if what == "parts":
                update.apply(gradients.of(self.model.layers[0]))
                update.apply(gradients.of(self.model.layers[-1]))
            elif what == "shared":
                update.apply(gradients, "one")
                update.apply(gradients, "other")
            else:
                update.apply(gradients)
            if what == "average":
                update.average(self.model.layers[-1], of=self.other, decay=0.5)

    task = Task()
    task.other = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)])
    task.other.trainable = False
    if what == "constraint":
        task.model.layers[-1].kernel.constraint = keras.constraints.NonNeg()
    optimizer = AdamWScheduleFree(0.1)
    if what == "shared":
        optimizer = {"one": optimizer, "other": keras.optimizers.SGD(0.1)}
    match = {
        "constraint": "has a constraint",
        "average": "changed by update.average",
        "parts": "must update all of them at once",
        "shared": "is updated by a schedule-free optimizer and by other",
    }
    with pytest.raises(ConfigError, match=match[what]):
        ddl.Trainer(task, optimizer, data(48), global_batch_size=16)


def test_another_optimizer_cannot_evaluate_its_checkpoint(tmp_path):
    """It would evaluate the weights at which gradients are computed."""
    trainer = build(make_strategy("one_device", 1))
    trainer.train(2)
    checkpoints = ddl.Checkpoints(tmp_path, trainer)
    checkpoints.save()
    checkpoints.finish()
    set_precision("float64")
    other = ddl.Trainer(
        Grouped(), keras.optimizers.SGD(0.1), data(48), eval_data=data(20), global_batch_size=16
    )
    with pytest.raises(ModelDirectoryError):
        ddl.Checkpoints(tmp_path, other).restore_model()
