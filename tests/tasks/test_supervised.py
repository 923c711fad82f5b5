"""Losses, metrics, masks, weights and outputs as Keras users hand them over."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.errors import ConfigError, DataError
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


def tagger(heads=()):
    """A model whose outputs by step have a mask, and that by example has none."""
    keras.utils.set_random_seed(3)
    words = keras.Input((STEPS,), name="words", dtype="int32")
    vectors = keras.layers.Embedding(10, 4, mask_zero=True)(words)
    states = keras.layers.Dense(4, "tanh")(vectors)
    pooled = keras.layers.GlobalAveragePooling1D()(states)
    outputs = {
        "tags": keras.layers.Dense(3, "softmax", name="tags")(states),
        "other": keras.layers.Dense(3, "softmax", name="other")(states),
        "kind": keras.layers.Dense(1, "sigmoid", name="kind")(pooled),
    }
    if not heads:
        return keras.Model(words, outputs["tags"])
    made = keras.Model({"words": words}, {name: outputs[name] for name in heads})
    if len(heads) == 3:
        made.get_layer("other").trainable = False  # as nothing trains it
    return made


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


TAGS_ALONE = functools.partial(ddl.Supervised, input_name="words")
CASES = {
    "a mask": ((WORDS, TAGS), TAG_LOSS, TAG_LOSS, {}),
    "ignore_class": (
        (WORDS, TAGS),
        SPARSE(ignore_class=1),
        SPARSE(ignore_class=1, reduction=None),
        {},
    ),
    "weights of steps": (
        (WORDS, TAGS, OF_STEPS),
        SPARSE(reduction=WEIGHTED),
        SPARSE(reduction=None),
        {},
    ),
    "class weights": (
        (WORDS, TAGS, np.array([1, 3, 0.25])[TAGS]),
        SPARSE(reduction=WEIGHTED),
        TAG_LOSS,
        {"class_weight": {1: 3.0, np.int64(2): np.float32(0.25)}},  # as of np.unique
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_masks_and_weights_are_those_of_keras(case):
    """Evaluation of one batch, and weights after updates of SGD."""
    data, loss, ours, options = case
    weighted = {"weighted_metrics": ["accuracy"]}
    expected, weights = keras_trained(tagger(), data, loss=loss, **weighted)
    given = data[:2] if "class_weight" in options else data
    found, _, own = trained(
        lambda: TAGS_ALONE(tagger(), ours, metrics=["accuracy"], **options),
        given,
        global_batch_size=len(TAGS),
    )
    assert found == pytest.approx(expected, abs=1e-6)
    for one, other in zip(own, weights, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)


HEADS = ("tags", "other", "kind")
LABELS = {"tags": TAGS, "kind": KINDS}


def three_heads():
    losses = {"tags": TAG_LOSS, "other": None, "kind": KIND_LOSS}
    metrics = {"tags": ["accuracy"], "kind": ["accuracy", "AUC"]}
    return ddl.Supervised(tagger(HEADS), losses, metrics=metrics, loss_weights={"kind": 0.5})


def test_several_outputs_are_those_of_keras():
    """Dicts in and out, masks that differ, a head without a label."""
    data = {"words": WORDS}, LABELS
    found, _, own = trained(three_heads, data, global_batch_size=len(TAGS))
    auc = found.pop("kind_AUC")
    model = tagger(HEADS)
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


def test_losses_in_a_list_and_one_mask_for_all():
    """Outputs with the same mask need no rows of other replicas, so microbatches are allowed."""
    losses, data = [TAG_LOSS, TAG_LOSS], ({"words": WORDS}, {"tags": TAGS, "other": TAGS[::-1]})
    task = lambda: ddl.Supervised(tagger(HEADS[:2]), losses)  # noqa: E731
    found, _, _ = trained(task, data, accumulation_steps=2)
    assert found["loss"] == pytest.approx(found["tags_loss"] + found["other_loss"], abs=1e-6)
    with pytest.raises(ConfigError, match="the whole global batch at once.*ACCUMULATION_STEPS = 1"):
        trained(three_heads, ({"words": WORDS}, LABELS), accumulation_steps=2)


@pytest.mark.parametrize(
    ("task", "options"),
    [
        (lambda: TAGS_ALONE(tagger(), TAG_LOSS, metrics=["accuracy", "AUC"][:1]), {}),
        (three_heads, {}),
    ],
    ids=["a mask and weights", "several outputs"],
)
def test_the_same_on_two_replicas_with_padding(task, options):
    """In float64: batches of 8 rows and of 3, where all weights of some rows are 0."""
    set_precision("float64")
    data = {"words": WORDS, "label": TAGS, **LABELS}
    if task is not three_heads:
        data = {"words": WORDS, "label": TAGS, "weight": OF_STEPS * (TAGS > 0)}
    one = trained(task, data)
    other = trained(task, data, ("mirrored", 2))
    for found, expected in zip(other[:2], one[:2], strict=True):
        assert found == pytest.approx(expected, abs=1e-10)
    for found, expected in zip(other[2], one[2], strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-10)


X = RANDOM.normal(size=(22, 3)).astype("f4")
Y = X.sum(1).astype("f4")
CLASSES = (Y > 0).astype("i8") + (Y > 1)
WEIGHT = RANDOM.uniform(0.5, 2, 22).astype("f4")
PARTS = {"a": X[:, :2], "b": X[:, 2:]}


def model(outputs=1, activation=None):
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(outputs, activation)])


def evaluated(task, data):
    """The figures of untrained weights, and the outputs."""
    trainer = ddl.Trainer(task, "sgd", data, eval_data=data, global_batch_size=8)
    return trainer.evaluate(), trainer.predict(data)


@pytest.mark.parametrize(
    ("loss", "outputs", "activation", "labels", "metrics"),
    [
        ("mse", 1, None, Y, ["mae", "mean_squared_error"]),
        (KIND_LOSS, 1, "sigmoid", (CLASSES > 0).astype("f4"), ["accuracy"]),
        (TAG_LOSS, 3, "softmax", CLASSES[:, None], ["accuracy"]),
        ("categorical_crossentropy", 3, "softmax", np.eye(3, dtype="f4")[CLASSES], ["accuracy"]),
    ],
)
def test_figures_are_keras_ones(loss, outputs, activation, labels, metrics):
    task = ddl.Supervised(model(outputs, activation), loss, metrics=metrics)
    found, predicted = evaluated(task, (X, labels))
    own = keras.Sequential([keras.Input((outputs,)), keras.layers.Identity()])
    own.compile(loss=loss, metrics=metrics)
    expected = own.evaluate(predicted, labels, batch_size=22, verbose=0, return_dict=True)
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "data",
    [
        (X, Y, WEIGHT),
        ({"image": X}, Y, WEIGHT),
        tf.data.Dataset.from_tensor_slices((X, Y, WEIGHT)),
    ],
    ids=["tuple", "dict and labels", "stream"],
)
def test_forms_of_weighted_data(data):
    found, predicted = evaluated(ddl.Supervised(model(), "mse"), data)
    errors = predicted[:, 0] - Y
    assert found["loss"] == pytest.approx((errors**2 * WEIGHT).sum() / WEIGHT.sum(), rel=1e-5)


@pytest.mark.parametrize("batched", [False, True])
def test_weights_of_steps_in_a_stream(batched):
    """Whether it gives examples or batches."""
    data = tf.data.Dataset.from_tensor_slices((WORDS, TAGS, OF_STEPS))
    found, _, _ = trained(
        lambda: TAGS_ALONE(tagger(), TAG_LOSS), data.batch(4) if batched else data
    )
    expected, _, _ = trained(lambda: TAGS_ALONE(tagger(), TAG_LOSS), (WORDS, TAGS, OF_STEPS))
    assert found == pytest.approx(expected, abs=1e-6)


def several_inputs():
    inputs = {"a": keras.Input((2,), name="a"), "b": keras.Input((1,), name="b")}
    joined = keras.layers.concatenate(list(inputs.values()))
    return keras.Model(inputs, keras.layers.Dense(1)(joined))


class Subclass(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, inputs, training=False):
        return self.dense(tf.concat([inputs["a"], inputs["b"]], -1))


@pytest.mark.parametrize("make", [several_inputs, Subclass])
def test_a_model_of_several_inputs(make):
    found, predicted = evaluated(ddl.Supervised(make(), "mse"), (PARTS, Y))
    assert found["loss"] == pytest.approx(((predicted[:, 0] - Y) ** 2).mean(), rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"loss": "msee"}, "a loss of Keras, its name, such as 'mse', .* got 'msee'. Correct"),
        ({"loss": keras.losses.MeanSquaredError()}, "Create it with reduction=None"),
        ({"loss": 3}, "or a function of .* got 3"),
        ({"metrics": ["AUC", "AUC"]}, "two metrics with the name 'AUC'"),
        ({"metrics": ["MeanIoU"]}, "cannot make the metric MeanIoU .*num_classes"),
        ({"metrics": ["acuracy"]}, "got 'acuracy'"),
        ({"metrics": "accuracy"}, r"must be a list, got 'accuracy'. Write \['accuracy'\]"),
        ({"metrics": {"a": ["mae"]}}, "give losses and metrics as dicts by output"),
        ({"class_weight": {"cat": 1}}, "must map integers"),
        ({"class_weight": {0: 1}, "loss": {"a": "mse"}}, "needs a single loss"),
        ({"loss": {"a": "mse"}, "loss_weights": {"b": 1}}, "outputs with a loss, a, got {'b': 1}"),
        ({"model": 3}, "must be a Keras model"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ConfigError, match=message):
        ddl.Supervised(**{"model": model(), "loss": "mse", **arguments})


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        ({"image": X}, DataError, "no feature 'label', only image"),
        ({"label": Y}, DataError, "needs an input, but the data have only the features label"),
        (({"label": X}, Y), DataError, "x has the feature 'label' too"),
        ((X, Y, WEIGHT, X), DataError, r"a tuple \(x, y\[, weight\]\), got a tuple of 4"),
        ((X, np.stack([Y, Y], 1)), ConfigError, r"outputs in the shape of the labels, got .* 2\)"),
        ((X[:, :2], Y), DataError, r"'image' of the data has shape \(2,\), but the model"),
        ((X.astype(str), Y), DataError, "'image' of the data is text, but the model"),
        ((PARTS, Y), ConfigError, "has one input, but the data have the features a, b"),
        ((X, np.full(len(X), "cat")), DataError, "must be numbers.*'label': text"),
        ((X, Y, np.stack([WEIGHT] * 2, 1)), ConfigError, r"weights of entries, \(\d, 2\), do not"),
    ],
)
def test_bad_data(data, error, message):
    with pytest.raises(error, match=message):
        ddl.Trainer(ddl.Supervised(model(), "mse"), "sgd", data, global_batch_size=8)


@pytest.mark.parametrize(
    ("loss", "metrics", "name"),
    [
        ("categorical_crossentropy", [], "loss 'categorical_crossentropy'"),
        (TAG_LOSS, ["categorical_accuracy"], "'categorical_accuracy'"),
    ],
)
def test_integer_labels_where_keras_needs_one_hot_rows(loss, metrics, name):
    """Keras's accuracy would take the index of the largest label of the batch as the class."""
    task = ddl.Supervised(model(3, "softmax"), loss, metrics=metrics)
    remedy = r".* got outputs \(\d+, 3\) for labels .* For integer labels, use 'sparse_categorical_"
    with pytest.raises(ConfigError, match=f"{name} needs {remedy}"):
        ddl.Trainer(task, "sgd", (X, CLASSES), global_batch_size=8)


def test_a_loss_of_ones_own_may_take_text():
    def loss(labels, outputs):
        return tf.cast(tf.equal(labels[:, 0], "cat"), outputs.dtype) * outputs[:, 0] ** 2

    data = (X, np.full(len(X), "cat"))
    ddl.Trainer(ddl.Supervised(model(), loss), "sgd", data, global_batch_size=8)


def test_bad_weights_of_steps_stop_the_run():
    data = (WORDS, TAGS, np.where(TAGS == 2, -1.0, 1.0))
    with pytest.raises(DataError, match="must hold finite numbers of at least 0"):
        trained(lambda: TAGS_ALONE(tagger(), TAG_LOSS), data)


def test_other_outputs_than_those_of_the_losses():
    task = ddl.Supervised(tagger(HEADS), {"tag": TAG_LOSS})
    message = r"needs a model with tag, but .* returns \['tags', 'other', 'kind'\]"
    with pytest.raises(ConfigError, match=message):
        ddl.Trainer(task, "sgd", ({"words": WORDS}, {"tag": TAGS}), global_batch_size=8)
    task = ddl.Supervised(tagger(HEADS), TAG_LOSS)
    with pytest.raises(ConfigError, match="one output, but .*Give ddl.Supervised losses as a dict"):
        ddl.Trainer(task, "sgd", ({"words": WORDS}, TAGS), global_batch_size=8)
