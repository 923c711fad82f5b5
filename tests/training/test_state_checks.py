import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl import microbatch
from ddl.errors import TrainingDiverged
from tests.conftest import make_strategy

DATA = {"image": np.ones((8, 3), "f4"), "label": np.zeros(8, "i4")}


def model(*layers):
    return keras.Sequential([keras.Input((3,)), *layers, keras.layers.Dense(2)])


@pytest.mark.parametrize("infinite", ["metric", "both"])
def test_a_metric_that_is_not_finite_is_named(infinite):
    class Undefined(ddl.Classification):
        def per_example(self, features, training):
            output = super().per_example(features, training)
            none = tf.zeros_like(output.loss) / 0.0
            loss = output.loss + none if infinite == "both" else output.loss
            return ddl.PerExample(loss, {**output.metrics, "ratio": none})

    trainer = ddl.Trainer(Undefined(model()), "sgd", DATA, global_batch_size=4)
    what = "the metric 'ratio'" if infinite == "metric" else "the loss"
    with pytest.raises(TrainingDiverged, match=f"at step 1: {what} is not finite from batch 0 on"):
        trainer.train(1)


def test_a_loss_that_overflows_in_float16_names_the_layer():
    class Half(ddl.Classification):
        def per_example(self, features, training):
            outputs = self.model(features["image"], training=training)
            return ddl.PerExample(tf.reduce_sum(outputs, 1) * 0 + tf.constant(6e4, "float16") * 2)

    keras.config.set_dtype_policy("mixed_float16")
    last = keras.layers.Dense(2, name="last")
    task = Half(keras.Sequential([keras.Input((3,)), last]))
    keras.config.set_dtype_policy("float32")
    trainer = ddl.Trainer(task, "sgd", DATA, global_batch_size=4)
    with pytest.raises(TrainingDiverged, match="65,504: give the last layer, 'last', dtype='float"):
        trainer.train(30)


def test_the_step_of_a_divergence_is_not_later_than_the_loop():
    """With a loss scale, updates after the bad one may have been skipped."""

    class Undefined(ddl.Classification):
        def per_example(self, features, training):
            output = super().per_example(features, training)
            current = microbatch.current()
            batch = 2 if current is None else tf.cast(current.counter[1], tf.int64)
            loss = tf.where(tf.equal(batch, 1), np.inf, 1.0) * output.loss
            nothing = tf.zeros_like(loss)
            ratio = tf.where(batch == 0, nothing / nothing, nothing)
            return ddl.PerExample(loss, {"ratio": ratio})

    given = {"global_batch_size": 4, "loss_scale": ddl.LossScale(4.0), "steps_per_loop": 2}
    trainer = ddl.Trainer(Undefined(model()), "sgd", DATA, **given)
    with pytest.raises(TrainingDiverged, match=r"by step 2: the metric 'ratio' .* from batch 0 on"):
        trainer.train(2)


def test_weights_that_are_not_finite_are_named_unless_they_are_so_by_design():
    class Masked(keras.layers.Layer):
        def build(self, shape):
            infinite = keras.initializers.Constant(-np.inf)
            self.add_weight(name="mask", shape=(1,), trainable=False, initializer=infinite)

        def call(self, x):
            return x

    with make_strategy("mirrored", 2).scope():
        trainer = ddl.Trainer(ddl.Classification(model(Masked())), "sgd", DATA, global_batch_size=4)
    trainer.check_finite()
    trainer.model.trainable_variables[-1].assign([0.0, np.nan])
    with pytest.raises(TrainingDiverged, match="bias is not finite"):
        trainer.check_finite()


class Forgotten(ddl.Classification):
    def per_example(self, features, training):
        return super().per_example(features, training=False)


@pytest.mark.parametrize("task", [ddl.Classification, Forgotten])
def test_a_task_that_does_not_pass_training_on_is_named(task, caplog):
    layers = [keras.layers.Dense(3), keras.layers.BatchNormalization(name="norm")]
    model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dropout(0.5, name="drop")])
    ddl.Trainer(task(model), "sgd", (np.ones((8, 4)), np.zeros(8, int)), global_batch_size=8)
    named = "Forgotten.per_example runs norm, drop as in an evaluation" in caplog.text
    assert named == (task is Forgotten)
