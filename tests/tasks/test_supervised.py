"""Losses, metrics, masks, weights and outputs as Keras users hand them over."""

import keras
import numpy as np
import pytest

import ddl
from ddl.errors import ConfigError
from ddl.precision import set_precision
from tests.conftest import make_strategy

RANDOM = np.random.default_rng(0)
ROWS, STEPS, UPDATES = 8, 5, 3
WORDS = RANDOM.integers(1, 10, (11, STEPS))
WORDS[np.arange(STEPS) > np.arange(11)[:, np.newaxis] % STEPS] = 0  # of 1 to 5 words
TAGS = RANDOM.integers(0, 3, WORDS.shape)
KINDS = RANDOM.integers(0, 2, 11).astype("f4")
OF_STEPS = RANDOM.uniform(0.2, 2, WORDS.shape).astype("f4")
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


def trained(task, data, where=("one_device", 1), **options):
    """Figures of an evaluation before training and of training, and the weights after it."""
    with make_strategy(*where).scope():
        made = task()
        options = {"global_batch_size": ROWS, "shuffle": False, **options}
        optimizer = keras.optimizers.SGD(0.5)
        trainer = ddl.Trainer(made, optimizer, data, eval_data=data, **options)
    before = trainer.evaluate()
    return before, trainer.train(UPDATES), [v.numpy() for v in made.model.variables]


def keras_trained(model, data, steps=UPDATES, **compiled):
    """The same by Keras, for one batch."""
    model.compile(keras.optimizers.SGD(0.5), **compiled)
    x, y, *weight = data
    given = {"sample_weight": weight[0] if weight else None, "batch_size": len(TAGS), "verbose": 0}
    before = model.evaluate(x, y, return_dict=True, **given)
    model.fit(x, y, shuffle=False, epochs=steps, **given)
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
TWO_ERRORS = np.arange(2)[:, np.newaxis], np.zeros((2, 1)), np.array([3.0, 1.0])
SQUARED = keras.losses.MeanSquaredError(WEIGHTED)
OF_CLASSES = {"class_weight": {1: 3.0, np.int64(2): np.float32(0.25)}}  # as of np.unique
OF_TAGS = np.array([1, 3, 0.25])[TAGS]
# Model, data, Keras's loss, and loss and accuracy if they are known.
CASES = {
    "a mask": (lambda: looked_up(OF_WORDS, True), PADDED, TAG_LOSS, (0.687, 0.667)),
    "ignore_class": (
        lambda: looked_up([[0.28659, 0.71341]]),
        ONE_IGNORED,
        SPARSE(ignore_class=1),
        (1.2497, 0.1),
    ),
    "weights": (lambda: looked_up([[1.0], [2.0]]), TWO_ERRORS, SQUARED, (1.75, 0.0)),
    "weights of steps": (tagger, (WORDS, TAGS, OF_STEPS), SPARSE(reduction=WEIGHTED), None),
    "class weights": (tagger, (WORDS, TAGS, OF_TAGS), SPARSE(reduction=WEIGHTED), None),
}


ONE_AND_TWO = ("one_device", 1), ("mirrored", 2)


@pytest.mark.parametrize("case", CASES)
def test_masks_and_weights_are_those_of_keras(case):
    """Evaluation of one batch, with padding, and weights after updates of SGD."""
    (make, data, loss, figures), by_class = CASES[case], case == "class weights"
    weighted = {"metrics" if by_class else "weighted_metrics": ["accuracy"]}
    expected, weights = keras_trained(make(), data, loss=loss, **weighted)
    if figures is not None:
        assert (expected["loss"], expected["accuracy"]) == pytest.approx(figures, abs=5e-4)
    if not isinstance(loss, str):
        loss = type(loss).from_config({**loss.get_config(), "reduction": None})
    options = {"metrics": ["accuracy"], **(OF_CLASSES if by_class else {})}
    for where in ONE_AND_TWO:
        found, _, own = trained(
            lambda: ddl.Supervised(make(), loss, **options),
            data[:2] if by_class else data,
            where,
            global_batch_size=len(TAGS) + 1,
        )
        assert found == pytest.approx(expected, abs=1e-6)
        for one, other in zip(own, weights, strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)


LABELS = {"tags": TAGS, "kind": KINDS}


def three_heads():
    losses = {"tags": TAG_LOSS, "other": None, "kind": KIND_LOSS}
    metrics = {"tags": ["accuracy"], "kind": ["accuracy", "AUC"]}
    return ddl.Supervised(tagger(several=True), losses, metrics=metrics, loss_weights={"kind": 0.5})


def test_several_outputs_are_those_of_keras():
    """Dicts in and out, masks that differ, a head without a label."""
    data = {"words": WORDS}, LABELS
    found, _, own = trained(three_heads, data, global_batch_size=len(TAGS))
    auc = found.pop("kind_AUC")
    model = tagger(several=True)
    labelled = keras.Model(model.input, {name: model.output[name] for name in LABELS})
    expected, _ = keras_trained(
        labelled,
        data,
        loss={"tags": TAG_LOSS, "kind": KIND_LOSS},
        metrics={"tags": ["accuracy"], "kind": ["accuracy"]},
        loss_weights={"tags": 1.0, "kind": 0.5},
    )
    assert found == pytest.approx(expected, abs=1e-6)
    assert 0 <= auc <= 1
    for one, other in zip(own, (v.numpy() for v in model.variables), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)


def test_several_outputs_are_the_same_on_two_replicas_with_padding():
    """In float64: batches of 8 rows and of 3."""
    set_precision("float64")
    data = {"words": WORDS, **LABELS}
    one, other = (trained(three_heads, data, where) for where in ONE_AND_TWO)
    for found, expected in zip(other[:2], one[:2], strict=True):
        assert found == pytest.approx(expected, abs=1e-10)
    for found, expected in zip(other[2], one[2], strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-10)


X = RANDOM.normal(size=(22, 3)).astype("f4")
Y = X.sum(1).astype("f4")
WEIGHT = RANDOM.uniform(0.5, 2, 22).astype("f4")
PARTS = {"a": X[:, :2], "b": X[:, 2:]}


def model(outputs=1, activation=None):
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(outputs, activation)])


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        ((X, np.stack([Y, Y], 1)), ConfigError, r"outputs in the shape of the labels, got .* 2\)"),
        ((PARTS, Y), ConfigError, "has one input, but the data have the features a, b"),
        ((X, Y, np.stack([WEIGHT] * 2, 1)), ConfigError, r"weights of entries, \(\d, 2\), do not"),
    ],
)
def test_bad_data(data, error, message):
    with pytest.raises(error, match=message):
        ddl.Trainer(ddl.Supervised(model(), "mse"), "sgd", data, global_batch_size=8)
