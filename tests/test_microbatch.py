import keras
import numpy as np
import tensorflow as tf

import ddl
from ddl.checkpoints.checkpoints import Checkpoints
from ddl.microbatch import current
from tests.conftest import make_strategy, microbatch, save
from tests.training.test_trainer import DATA


def test_what_is_recomputed_for_the_backward_pass_draws_the_same():
    layer = keras.layers.Dropout(0.5)
    x = tf.ones([8, 16])

    @tf.function(autograph=False)
    def forward_and_gradient():
        current = microbatch()
        with tf.GradientTape() as tape, current.forward():
            tape.watch(x)
            y = tf.recompute_grad(lambda x: layer(x, training=True) ** 2)(x)
        with current.backward():
            return y, tape.gradient(y, x)

    y, gradient = forward_and_gradient()
    # y = (2·mask)², so its gradient is 8·mask: another mask would not fit.
    np.testing.assert_array_equal(gradient, 2 * y)
    assert {0.0, 4.0} == set(y.numpy().ravel())


class Asking:
    """Reports the position that a schedule would read, and what is drawn in an evaluation."""

    def __init__(self):
        self.model = keras.Sequential([keras.Input((6, 6, 1)), keras.layers.Flatten()])
        self.model.add(keras.layers.Dense(2))

    def per_example(self, features, training):
        logits = self.model(tf.cast(features["image"], tf.float32), training=training)
        loss = tf.nn.sparse_softmax_cross_entropy_with_logits(features["label"], logits)
        drawn = ddl.random.uniform(self, loss.shape)
        position = tf.ones_like(loss) * tf.cast(current().batch, loss.dtype)
        return ddl.PerExample(loss, {"position": position, "drawn": drawn})


def test_in_an_evaluation_the_batch_is_where_training_stands(tmp_path):
    strategy = make_strategy("mirrored", 2)

    def build():
        with strategy.scope():
            task, optimizer = Asking(), keras.optimizers.SGD(1e-3)
        return ddl.Trainer(
            task, optimizer, DATA, eval_data=DATA, global_batch_size=32, strategy=strategy
        )

    trainer = build()
    before = trainer.evaluate()
    assert before["position"] == 0
    trainer.train(6)
    assert trainer.train(1)["position"] == 6
    after = trainer.evaluate()
    assert after["position"] == 7  # of each batch that is evaluated
    assert after["drawn"] == before["drawn"]
    save(tmp_path, trainer)
    restored = build()
    Checkpoints(tmp_path, restored).restore_model()
    assert restored.evaluate()["position"] == 7
