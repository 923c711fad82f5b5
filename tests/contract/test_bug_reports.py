"""Programs in which people of other frameworks met wrong figures or failures.

Those with misleading errors are in test_wrong_arguments.py.
"""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.errors import ConfigError, TrainingDiverged

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(64, 3)).astype("f4")
Y = RANDOM.normal(size=(64, 1)).astype("f4")


def dense(*units, activation=None):
    layers = [keras.layers.Dense(each, activation) for each in units]
    return keras.Sequential([keras.Input((3,)), *layers])


def test_models_in_a_loop_may_have_a_mirrored_strategy_each():
    """Collectives of two strategies must not meet: they are of other shapes."""
    for units in [(1,), (4, 1)]:
        strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        with strategy.scope():
            task = ddl.Supervised(dense(*units), "mse")
            trainer = ddl.Trainer(task, "sgd", (X, Y), global_batch_size=16)
        assert np.isfinite(trainer.train(2, progress=False)["loss"])


@pytest.mark.parametrize("in_data", [False, True])
def test_weights_of_classes_are_for_the_loss_alone_and_those_in_the_data_also_for_metrics(in_data):
    """As Keras's class_weight and its weighted_metrics."""
    labels, model = RANDOM.integers(0, 3, 64), dense(3, activation="softmax")
    weight = np.array([5.0, 1.0, 1.0], "f4")[labels]
    hit = np.argmax(model(X), -1) == labels
    loss = keras.losses.sparse_categorical_crossentropy(labels, model(X)).numpy()
    given = {} if in_data else {"class_weight": {0: 5.0}}
    loss_name = "sparse_categorical_crossentropy"
    task = ddl.Supervised(model, loss_name, metrics=["accuracy"], **given)
    data = (X, labels, weight) if in_data else (X, labels)
    found = ddl.Trainer(task, "sgd", data, global_batch_size=64).train(1, progress=False)
    right = np.average(hit, weights=weight if in_data else None)
    assert found["accuracy"] == pytest.approx(right, abs=1e-6)
    assert found["loss"] == pytest.approx(np.average(loss, weights=weight), rel=1e-5)


def test_ctc_is_trained_and_evaluated(capfd):
    outputs, labels = RANDOM.normal(size=(16, 6, 4)).astype("f4"), RANDOM.integers(1, 4, (16, 2))
    model = keras.Sequential([keras.Input((6, 4)), keras.layers.Dense(4)])
    right = float(np.mean(keras.losses.ctc(labels, model(outputs))))
    task = ddl.Supervised(model, keras.losses.CTC(reduction=None))
    data = (outputs, labels)
    trainer = ddl.Trainer(task, "sgd", data, eval_data=data, global_batch_size=8)
    assert trainer.evaluate()["loss"] == pytest.approx(right, rel=1e-5)
    assert np.isfinite(trainer.train(2, progress=False)["loss"])
    assert "tfg.While" not in capfd.readouterr().err  # of loops over 4 and 8 examples


class Repeated(keras.Model):
    """A subclassed model of words and numbers, with a recurrent layer and the table as output."""

    def __init__(self, **options):
        super().__init__(**options)
        self.ids = keras.layers.TextVectorization(output_sequence_length=3, vocabulary=["a", "b"])
        self.table = keras.layers.Embedding(4, 4)
        self.recurrent = keras.layers.GRU(4, return_sequences=True)

    def call(self, given, scale=1.0, training=False):
        vectors = self.table(self.ids(given["words"])) * given["factor"][:, None]
        vectors = self.recurrent(vectors, training=training)
        return keras.ops.matmul(vectors, keras.ops.transpose(self.table.embeddings))


class Tagging:
    """A task of its own: Keras does not know the dtypes of its model's inputs."""

    def __init__(self):
        self.model = Repeated()

    def per_example(self, features, training):
        inputs = {k: features[k] for k in ("words", "factor")}
        outputs = self.model(inputs, scale=2.0, training=training)
        loss = keras.losses.sparse_categorical_crossentropy
        return ddl.PerExample(loss(features["tag"], outputs, from_logits=True))

    def predict(self, features):
        return self.model(features)


def test_a_look_up_on_replicas_exports_without_warnings(caplog, monkeypatch, tmp_path):
    monkeypatch.setattr(tf.get_logger(), "propagate", True)
    words = np.array([*map(" ".join, RANDOM.choice(["a", "b", "c"], (16, 3)))], object)
    data = {"words": words, "factor": X[:16, :1], "tag": RANDOM.integers(0, 3, (16, 3))}
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        trainer = ddl.Trainer(Tagging(), "sgd", data, global_batch_size=8, accumulation_steps=2)
    trainer.train(1, progress=False)
    assert caplog.messages == []
    ddl.export(trainer, tmp_path / "export")
    custom = {"Repeated": Repeated}
    exported = keras.models.load_model(tmp_path / "export" / "model.keras", custom_objects=custom)
    given = {"words": tf.constant(words.tolist()), "factor": tf.constant(X[:16, :1])}
    predicted = trainer.predict(data)
    np.testing.assert_allclose(predicted, exported(given), rtol=1e-5, atol=1e-7)
    saved = tf.saved_model.load(tmp_path / "export" / "saved_model")
    np.testing.assert_allclose(saved.serve(given), predicted, rtol=1e-5, atol=1e-7)


class Counting(keras.layers.Layer):
    """Counts in a weight, and in a variable that Keras does not track."""

    def build(self, _):
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False)
        self.untracked = tf.Variable(0.0, trainable=False)

    def call(self, x):
        self.untracked.assign_add(1.0)
        self.calls.assign_add(1.0)
        return x * self.calls


class Passes(ddl.Supervised):
    """Counts its passes in a variable of its own, and in a layer's."""

    def __init__(self):
        model = keras.Sequential([Counting(), keras.layers.Dense(1)])  # built by a pass of ddl
        super().__init__(model, "mse")
        self.seen = tf.Variable(0.0, trainable=False)

    def per_example(self, features, training):
        self.seen.assign_add(1.0)
        return super().per_example(features, training)


@pytest.mark.parametrize("factor", [1.0, 1e30])
def test_evaluations_and_skipped_updates_leave_what_passes_count(factor):
    task, options = Passes(), {"loss_scale": ddl.LossScale(), "max_skipped_updates": 2}
    trainer = ddl.Trainer(task, "sgd", (X * factor, Y), global_batch_size=16, **options)
    with pytest.raises(TrainingDiverged) if factor > 1 else contextlib.nullcontext():
        trainer.train(3, progress=False)
    trainer.evaluate((X, Y))
    trainer.predict(X)
    counts = task.model.layers[0]
    assert [task.seen, counts.calls, counts.untracked] == [0 if factor > 1 else 3] * 3


def test_numbers_of_words_are_not_rounded_to_half_precision():
    """Keras builds a Sequential without an Input for bfloat16, in which 4097 is 4096."""
    keras.config.set_dtype_policy("mixed_bfloat16")
    model = keras.Sequential([keras.layers.Embedding(5000, 2), keras.layers.Flatten()])
    task = ddl.Classification(model)
    with pytest.raises(ConfigError, match="int64 input to bfloat16, .* Begin it with keras.Input"):
        ddl.Trainer(task, "sgd", (np.full((8, 1), 4097), np.arange(8) % 2), global_batch_size=8)


def recurrent(rows, stateful=False):
    layers = [keras.layers.GRU(2, stateful=stateful), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input(batch_shape=(rows, 3, 2)), *layers])


def test_a_fixed_batch_size_trains_but_states_from_batch_to_batch_are_refused():
    series = RANDOM.normal(size=(16, 3, 2)).astype("f4")

    def trainer(rows, **options):
        keras.utils.set_random_seed(0)
        task = ddl.Supervised(recurrent(rows, **options), "mse")
        return ddl.Trainer(task, "sgd", (series, Y[:16]), global_batch_size=8)

    losses = [trainer(rows).train(3, progress=False)["loss"] for rows in (8, None)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    with pytest.raises(ConfigError, match="'gru.*stateful=True.* Set stateful=False"):
        trainer(8, stateful=True)


def test_a_saved_model_does_not_augment(tmp_path):
    """Keras's own export serves layers such as RandomFlip as in training."""
    images = RANDOM.random((16, 4, 4, 1)).astype("f4")
    layers = [keras.layers.RandomFlip(), keras.layers.Flatten(), keras.layers.Dense(1)]
    task = ddl.Supervised(keras.Sequential([keras.Input((4, 4, 1)), *layers]), "mse")
    trainer = ddl.Trainer(task, "sgd", (images, Y[:16]), global_batch_size=8)
    ddl.export(trainer, tmp_path)
    exported = tf.saved_model.load(tmp_path / "saved_model")
    served, predicted = exported.serve(images), trainer.predict(images)
    np.testing.assert_allclose(served, predicted, rtol=1e-5, atol=1e-6)


def test_an_infinite_limit_of_the_norm_measures_it_and_clips_nothing():
    found = []
    for clip_norm in (None, float("inf")):
        keras.utils.set_random_seed(0)
        task = ddl.Supervised(dense(1), "mse")
        made = ddl.Trainer(task, "sgd", (X, Y), global_batch_size=16, clip_norm=clip_norm)
        found.append((made.train(2, progress=False), made.model.get_weights()))
    (_, plain), (figures, measured) = found
    np.testing.assert_array_equal(plain[0], measured[0])
    assert 0 < figures["gradient_norm"] < 100


def test_a_number_of_a_task_that_a_callback_changes_is_refused():
    """As a schedule of a loss weight: the traced loop would keep the first number."""

    class Weighted(ddl.Supervised):
        def __init__(self):
            super().__init__(dense(1), "mse")
            self.share = 0.5

        def per_example(self, features, training):
            found = super().per_example(features, training)
            return ddl.PerExample(self.share * found.loss)

    task = Weighted()
    trainer = ddl.Trainer(task, "sgd", (X, Y), global_batch_size=16)
    halve = ddl.Every(1, lambda run: setattr(task, "share", task.share / 2))
    with pytest.raises(ConfigError, match="share of Weighted .* keeps 0.5, got 0.25"):
        ddl.fit(trainer, train_steps=3, callbacks=[halve])


class Adds(keras.layers.Layer):
    """Adds a loss of its inputs."""

    def __init__(self, loss):
        super().__init__()
        self.loss = loss

    def call(self, inputs):
        self.add_loss(self.loss(inputs))
        return inputs


def test_losses_that_layers_add_are_means_over_rows_or_refused_on_replicas():
    """Sums, or products of means as for the load of experts, depend on the number of replicas."""

    def trained(loss, replicas, size=3):
        with tf.distribute.MirroredStrategy([f"CPU:{n}" for n in range(replicas)]).scope():
            hidden = keras.layers.Dense(1, kernel_initializer="ones")
            model = keras.Sequential([keras.Input((size,)), hidden, Adds(loss)])
            data = (X[:, :size], Y)
            trainer = ddl.Trainer(ddl.Supervised(model, "mse"), "sgd", data, global_batch_size=16)
        trainer.train(3, progress=False)
        return hidden.kernel.numpy()

    one, two = (trained(lambda x: tf.reduce_mean(x**2), replicas) for replicas in (1, 2))
    np.testing.assert_allclose(one, two, rtol=1e-5)
    for size, loss in enumerate((tf.reduce_sum, lambda x: tf.reduce_mean(x) ** 2), 1):
        with pytest.raises(ConfigError, match="means over the rows"):
            trained(loss, 2, size)
