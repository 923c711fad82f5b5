"""Losses, metrics, masks, weights and outputs as Keras users hand them over."""

import keras
import numpy as np
import pytest

import ddl
from ddl.errors import ConfigError
from ddl.precision import set_precision
from tests.conftest import make_strategy

RANDOM = np.random.default_rng(0)
STEPS = 5
WORDS = RANDOM.integers(1, 10, (11, STEPS))
WORDS[np.arange(STEPS) > np.arange(11)[:, np.newaxis] % STEPS] = 0  # of 1 to 5 words
TAGS = RANDOM.integers(0, 3, WORDS.shape)
KINDS = RANDOM.integers(0, 2, 11).astype("f4")
OF_STEPS = RANDOM.integers(1, 16, WORDS.shape) / 8  # ddl adds them in float32, here exactly
TAG_LOSS, KIND_LOSS = "sparse_categorical_crossentropy", "binary_crossentropy"
WEIGHTED = "mean_with_sample_weight"
SPARSE = keras.losses.SparseCategoricalCrossentropy


def tagger(several=False):
    """A model whose outputs by step have a mask, and that by example has none."""
    keras.utils.set_random_seed(3)
    words = keras.Input((STEPS,), name="words", dtype="int32")
    vectors = keras.layers.Embedding(10, 4, mask_zero=True)(words)
    states = keras.layers.Dense(4, "tanh")(vectors)
    pooled = keras.layers.GlobalAveragePooling1D()(states)
    outputs = {
        "tags": keras.layers.Dense(3, "softmax")(states),
        "other": keras.layers.Dense(3, "softmax", trainable=False)(states),
        "kind": keras.layers.Dense(1, "sigmoid")(pooled),
    }
    if several:
        return keras.Model({"words": words}, outputs)
    return keras.Model(words, outputs["tags"])


def trained(task, data, updates, batch_size):
    """Figures of an evaluation before training, and the weights after it, on two replicas."""
    with make_strategy("mirrored", 2).scope():
        made, sgd = task(), keras.optimizers.SGD(0.5)
        options = {"global_batch_size": batch_size, "shuffle": False, "eval_data": data}
        trainer = ddl.Trainer(made, sgd, data, **options)
    before = trainer.evaluate()
    trainer.train(updates)
    return before, [v.numpy() for v in made.model.variables]


def keras_trained(model, data, epochs, batch_size, **compiled):
    """The same by Keras on one device; the figures are those of one batch."""
    model.compile(keras.optimizers.SGD(0.5), run_eagerly=True, **compiled)
    x, y, *weight = data
    given = {"sample_weight": weight[0] if weight else None, "verbose": 0}
    before = model.evaluate(x, y, batch_size=len(TAGS), return_dict=True, **given)
    if batch_size < len(TAGS):  # each batch has a loss with a denominator of its own
        found = model.evaluate(x, y, batch_size=batch_size, return_dict=True, **given)
        before["loss"] = found["loss"]
    model.fit(x, y, batch_size=batch_size, shuffle=False, epochs=epochs, **given)
    return before, [v.numpy() for v in model.variables]


def looked_up(table, mask_zero=False):
    """A model whose outputs for a word are its row of the table."""
    layer = keras.layers.Embedding(len(table), len(table[0]), mask_zero=mask_zero)
    model = keras.Sequential([keras.Input((None,), dtype="int32"), layer])
    model.set_weights([np.array(table)])
    return model


# Of 8 words 5 are padding, whose outputs are right; so are those of 2 others. With the padding,
# loss and accuracy would be 0.257 and 0.875.
OF_WORDS = [[1, 0], [0.6, 0.4], [0.3541, 0.6459]]
PADDED = np.array([[1, 1, 0, 0], [2, 0, 0, 0]]), np.zeros((2, 4), int)
ONE_IGNORED = np.zeros((2, 5), int), np.eye(10, dtype=int)[3].reshape(2, 5)
# Model, data, Keras's loss, and loss and accuracy if they are known.
CASES = {
    "a mask": (lambda: looked_up(OF_WORDS, True), PADDED, TAG_LOSS, (0.687, 0.667)),
    "ignore_class": (
        lambda: looked_up([[0.28659, 0.71341]]),
        ONE_IGNORED,
        SPARSE(ignore_class=1),
        (1.2497, 0.1),
    ),
    "weights of steps": (tagger, (WORDS, TAGS, OF_STEPS), SPARSE(reduction=WEIGHTED), None),
}


@pytest.mark.parametrize("case", CASES)
def test_masks_and_weights_are_those_of_keras(case):
    """Evaluation of one batch, with padding, and weights after updates of SGD."""
    make, data, loss, figures = CASES[case]
    compiled = {"loss": loss, "weighted_metrics": ["accuracy"]}
    expected, weights = keras_trained(make(), data, 3, len(TAGS), **compiled)
    if figures is not None:
        assert (expected["loss"], expected["accuracy"]) == pytest.approx(figures, abs=5e-4)
    if not isinstance(loss, str):
        loss = type(loss).from_config({**loss.get_config(), "reduction": None})
    task = lambda: ddl.Supervised(make(), loss, metrics=["accuracy"])  # noqa: E731
    found, own = trained(task, data, 3, len(TAGS) + 1)
    assert found == pytest.approx(expected, abs=1e-6)
    for one, other in zip(own, weights, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)


LABELS = {"tags": TAGS, "kind": KINDS}
OF_OUTPUTS = {"tags": OF_STEPS, "kind": np.arange(len(KINDS)) / 8}
THREE = {"words": WORDS}, LABELS, OF_OUTPUTS


class Doubled(keras.metrics.BinaryAccuracy):
    def result(self):
        return 2 * super().result()


def three_heads():
    losses = {"tags": TAG_LOSS, "other": None, "kind": KIND_LOSS}
    metrics = {"tags": ["accuracy"], "kind": ["accuracy", "AUC", Doubled(name="doubled")]}
    return ddl.Supervised(tagger(several=True), losses, metrics=metrics, loss_weights={"kind": 0.5})


def test_several_outputs_are_those_of_keras():
    """Dicts in and out, masks and weights that differ, a head without a label; padded batches."""
    set_precision("float64")
    found, own = trained(three_heads, THREE, 4, 8)
    auc = found.pop("kind_AUC")
    model = tagger(several=True)
    losses = SPARSE(reduction=WEIGHTED), keras.losses.BinaryCrossentropy(reduction=WEIGHTED)
    expected, _ = keras_trained(
        keras.Model(model.input, {name: model.output[name] for name in LABELS}),
        THREE,
        epochs=2,
        batch_size=8,
        loss=dict(zip(LABELS, losses, strict=True)),
        weighted_metrics={"tags": ["accuracy"], "kind": ["accuracy", Doubled(name="doubled")]},
        loss_weights={"tags": 1.0, "kind": 0.5},
    )
    assert found == pytest.approx(expected, abs=1e-6)
    assert 0 <= auc <= 1
    for one, other in zip(own, (v.numpy() for v in model.variables), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-10)


def test_outputs_of_one_name_are_refused():
    inputs, head = keras.Input((3,)), keras.layers.Dense(1)
    with pytest.raises(ConfigError, match="outputs of one name"):
        ddl.Supervised(keras.Model(inputs, [head(inputs), head(-inputs)]), ["mse", "mse"])


X = RANDOM.normal(size=(22, 3)).astype("f4")
Y = X.sum(1).astype("f4")
PARTS = {"a": X[:, :2], "b": X[:, 2:]}


def model(outputs=1):
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(outputs)])


class OwnLoss(keras.Sequential):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return 0.0


def test_a_loss_of_the_models_own_is_refused():
    """Keras's `fit` would call it, and ddl would not."""
    with pytest.raises(ConfigError, match="does not call the compute_loss of 'own_loss"):
        ddl.Regression(OwnLoss([keras.Input((3,)), keras.layers.Dense(1)]))


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        ((X, np.stack([Y, Y], 1)), ConfigError, r"outputs in the shape of the labels, got .* 2\)"),
        ((PARTS, Y), ConfigError, "has one input, but the data have the features a, b"),
        ((X, Y, np.ones((22, 2), "f4")), ConfigError, r"weights of entries, \(\d, 2\), do not"),
    ],
)
def test_bad_data(data, error, message):
    with pytest.raises(error, match=message):
        ddl.Trainer(ddl.Supervised(model(), "mse"), "sgd", data, global_batch_size=8)


@pytest.mark.parametrize(
    ("activation", "loss", "said"),
    [
        ("softmax", TAG_LOSS, ""),
        (None, SPARSE(from_logits=True, reduction=None), ""),
        (None, "mse", ""),
        ("softmax", SPARSE(from_logits=True, reduction=None), "Remove the softmax"),
        ("softmax", None, "Remove the softmax"),
        (None, TAG_LOSS, "the loss takes probabilities"),
        (None, keras.losses.BinaryCrossentropy(reduction=None), "the loss takes probabilities"),
    ],
)
def test_a_last_layer_that_does_not_fit_the_loss_is_warned_of(activation, loss, said, caplog):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, activation)])
    _ = ddl.Supervised(model, loss) if loss else ddl.Classification(model)
    assert said in caplog.text
    assert bool(said) == bool(caplog.text)


def test_a_softmax_that_is_no_layer_is_seen(caplog):
    class OwnCall(keras.Model):
        def __init__(self):
            super().__init__()
            self.logits = keras.layers.Dense(2)

        def call(self, inputs):
            return keras.ops.softmax(self.logits(inputs))

    inputs = keras.Input((3,))
    functional = keras.Model(inputs, keras.ops.softmax(keras.layers.Dense(2)(inputs)))
    for model in (functional, OwnCall()):
        ddl.Supervised(model, TAG_LOSS)
    assert caplog.text == ""
