"""Evaluations and predictions on data that a call gives."""

import gc
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.distribution.workers import Workers
from ddl.errors import ConfigError, DataError
from ddl.training.actions import EachLoop
from tests.conftest import make_strategy

IMAGES = np.random.default_rng(0).normal(size=(30, 3)).astype("f4")
LABELS = np.arange(30) % 2
DATA = {"image": IMAGES, "label": LABELS}


class Items:
    """Examples by their index, as PyTorch's data sets have them."""

    def __len__(self):
        return 30

    def __getitem__(self, index):
        return IMAGES[index], LABELS[index]


class Batches(keras.utils.PyDataset):
    """Batches of 7, the last of 2."""

    def __len__(self):
        return 5

    def __getitem__(self, number):
        return IMAGES[7 * number :][:7], LABELS[7 * number :][:7]


class TwoOutputs(ddl.Classification):
    """Returns a dict with a tuple, to see that the structure is kept."""

    def predict(self, features):
        logits = self.model(features["image"], training=False)
        return {"both": (logits, tf.argmax(logits, -1)), "row": features["image"][:, 0]}


def make_trainer(strategy, task=ddl.Classification, **arguments):
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        return ddl.Trainer(
            task(model),
            keras.optimizers.SGD(0.1),
            **{"train_data": DATA, "global_batch_size": 8, **arguments},
        )


@pytest.fixture(scope="module", params=[("one_device", 1), ("mirrored", 2)])
def trainer(request):
    return make_trainer(make_strategy(*request.param), eval_data=DATA)


def test_given_data_are_evaluated_as_the_trainers_own(trainer):
    expected = trainer.evaluate()
    rows = len(trainer.history)
    for data in (
        DATA,
        (IMAGES, LABELS),
        ddl.data.Source(DATA),
        tf.data.Dataset.from_tensor_slices(DATA),
    ):
        assert trainer.evaluate(data) == expected
    assert len(trainer.history) == rows  # these are figures of the trainer's own data


def with_noise(item, seed):
    """Adds noise that depends on the number of the epoch."""
    return {**item, "image": item["image"] + tf.random.stateless_normal([3], seed)}


@pytest.mark.parametrize(
    "data",
    [
        ddl.data.Source(DATA, with_noise),
        ddl.data.mix([DATA, {"image": -IMAGES, "label": LABELS}], (0.5, 0.5)),
        ddl.data.stream(
            lambda epoch: tf.data.Dataset.from_tensor_slices(
                {"image": IMAGES + np.float32(epoch), "label": LABELS}
            )
        ),
    ],
    ids=["decoded", "mixture", "stream"],
)
def test_each_evaluation_reads_the_same_examples(data):
    """Also those of a resumed run, which begin with a new trainer, as `evaluate(data)` does."""
    trainer = make_trainer(make_strategy("one_device", 1), eval_data=data)
    expected = trainer.evaluate()
    assert [trainer.evaluate() for _ in range(2)] == [expected] * 2
    assert trainer.evaluate(data) == expected


FORMS = {
    "(x, y)": (IMAGES, LABELS),
    "dict": DATA,
    "(dict, y, sample_weight)": ({"image": IMAGES}, LABELS, np.ones(30)),
}


def test_given_data_may_be_python_objects(trainer):
    for data in (Items(), Batches()):
        assert trainer.evaluate(data)["loss"] == pytest.approx(trainer.evaluate()["loss"])
        np.testing.assert_array_equal(trainer.predict(data), trainer.predict(IMAGES))
    endless = tf.data.Dataset.from_tensor_slices(DATA).repeat().batch(7)
    for call in (trainer.evaluate, trainer.predict):
        with pytest.raises(DataError, match="no end"):
            call(endless)


@pytest.mark.parametrize("form", FORMS)
def test_batches_of_tf_data_are_the_same_examples(trainer, form):
    """Of another size than the trainer's, and with a shorter last one."""
    batches = tf.data.Dataset.from_tensor_slices(FORMS[form]).batch(7).prefetch(1)
    assert trainer.evaluate(batches) == trainer.evaluate(DATA)
    np.testing.assert_array_equal(trainer.predict(batches), trainer.predict(IMAGES))


def test_a_trainer_takes_batches_of_tf_data():
    """As it takes the examples: the same weights, to the bit. tests/data/test_stream.py: all."""
    trained = []
    for batched in (False, True):
        data = tf.data.Dataset.from_tensor_slices(FORMS["(dict, y, sample_weight)"])
        data = data.batch(7) if batched else data
        trainer = make_trainer(make_strategy("one_device", 1), train_data=data, eval_data=data)
        trainer.train(5)
        trained.append([*trainer.model.get_weights(), trainer.evaluate()["loss"]])
    for one, other in zip(*trained, strict=True):
        np.testing.assert_array_equal(one, other)


def test_predictions_of_batches_of_inputs(trainer):
    inputs = tf.data.Dataset.from_tensor_slices(IMAGES)
    for data in (inputs, inputs.batch(7)):
        np.testing.assert_array_equal(trainer.predict(data), trainer.predict(IMAGES))


def test_padding_and_weights_count_as_they_should(trainer):
    weight = np.linspace(0, 1, 13).astype("f4")
    part = {"image": IMAGES[:13], "label": LABELS[:13], "weight": weight}
    logits = IMAGES[:13] @ trainer.model.layers[0].kernel.numpy()
    right = (logits.argmax(1) == LABELS[:13]).astype("f8")
    found = trainer.evaluate(part)["accuracy"]
    assert found == pytest.approx((right * weight).sum() / weight.sum(), rel=1e-6)


def test_one_trace_serves_all_data_of_a_form(trainer):
    trainer.evaluate(DATA)
    evaluations = trainer._parts.given._evaluations
    traced = [one._loop.experimental_get_tracing_count() for one in evaluations.values()]
    for count in (29, 30, 22, 6):
        trainer.evaluate({name: values[:count] for name, values in DATA.items()})
    after = [one._loop.experimental_get_tracing_count() for one in evaluations.values()]
    assert after == traced


def test_data_are_freed_after_the_call(trainer):
    source = ddl.data.Source(DATA)
    given = weakref.ref(source)
    trainer.evaluate(source)
    trainer.predict(source)
    del source
    gc.collect()
    assert given() is None


@pytest.mark.parametrize("count", [30, 8, 3])
def test_predictions_are_the_models_outputs_in_order(trainer, count):
    expected = IMAGES[:count] @ trainer.model.layers[0].kernel.numpy()
    expected += trainer.model.layers[0].bias.numpy()
    stream = tf.data.Dataset.from_tensor_slices({"image": IMAGES[:count]})
    for data in (IMAGES[:count], {"image": IMAGES[:count]}, tf.constant(IMAGES[:count]), stream):
        found = trainer.predict(data)
        assert isinstance(found, np.ndarray)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_weights_of_zero_are_predicted_too(trainer):
    weight = (np.arange(30) % 2).astype("f4")
    found = trainer.predict({**DATA, "weight": weight})
    np.testing.assert_array_equal(found, trainer.predict(DATA))


DTYPES = ("bool", "uint8", "int8", "int16", "uint16", "uint32", "uint64", "bfloat16", "float16")
DTYPES += ("float32", "float64", "int32", "int64")


def test_outputs_of_all_dtypes_pass_between_workers(monkeypatch):
    """The collective takes five dtypes; the others are cast, and back without loss."""

    class AllDtypes(WithoutOutputs):
        def predict(self, features):
            return {name: limits(name, features["label"]) for name in DTYPES}

    def limits(name, label):
        dtype = tf.as_dtype(name)
        ends = (False, True) if dtype.is_bool else (dtype.min, dtype.max)
        low, high = (tf.constant(x, dtype) for x in ends)
        return tf.where(label > 0, tf.fill(label.shape, high), low)

    init, gathered = Workers.__init__, []

    def two(self, strategy):
        init(self, strategy)
        self.number = 2

    trainer = make_trainer(make_strategy("mirrored", 2), AllDtypes)
    gather = type(trainer.strategy).gather
    monkeypatch.setattr(Workers, "__init__", two)
    monkeypatch.setattr(
        type(trainer.strategy),
        "gather",
        lambda self, one, axis: gathered.append(one.values[0].dtype) or gather(self, one, axis),
    )
    found = trainer.predict(DATA)
    assert {x.name for x in gathered} <= {"float16", "float32", "float64", "int32", "int64"}
    for name in DTYPES:
        expected = limits(name, tf.constant(LABELS)).numpy()
        assert found[name].dtype == expected.dtype
        np.testing.assert_array_equal(found[name], expected)


def test_the_structure_of_outputs_is_kept():
    trainer = make_trainer(make_strategy("mirrored", 2), TwoOutputs)
    found = trainer.predict(IMAGES[:11])
    logits, classes = found["both"]
    assert logits.shape == (11, 2)
    np.testing.assert_array_equal(classes, logits.argmax(1))
    np.testing.assert_array_equal(found["row"], IMAGES[:11, 0])


class Drawing(ddl.Classification):
    def predict(self, features):
        return ddl.random.uniform(self, [features["image"].shape[0]])


def test_each_row_draws_numbers_of_its_own_wherever_reading_began():
    trainer = make_trainer(make_strategy("mirrored", 2), Drawing)
    drawn = trainer.predict(IMAGES)
    assert len(np.unique(drawn)) == len(IMAGES)
    later = [outputs for outputs, _ in trainer.predict_batches(IMAGES, first_batch=2)]
    np.testing.assert_array_equal(np.concatenate(later), drawn[16:])


def test_predictions_follow_the_training_and_its_average():
    average = ddl.ExponentialMovingAverage(0.5)
    trainer = make_trainer(make_strategy("one_device", 1), weight_average=average)
    before = trainer.predict(IMAGES)
    trainer.train(3)
    own = trainer.predict(IMAGES, averaged=False)
    averaged = trainer.predict(IMAGES)
    assert not np.array_equal(own, before)
    assert not np.array_equal(own, averaged)
    with trainer.evaluation_weights():
        np.testing.assert_allclose(averaged, trainer.model(IMAGES), rtol=1e-5, atol=1e-6)


def test_open_iterators_of_predictions_keep_the_evaluation_weights():
    average = ddl.ExponentialMovingAverage(0.5)
    trainer = make_trainer(make_strategy("one_device", 1), weight_average=average)
    trainer.train(3)
    own = trainer.model.get_weights()
    expected = trainer.predict(IMAGES)
    short, whole = trainer.predict_batches(IMAGES[:8]), trainer.predict_batches(IMAGES)
    next(short)
    found = [next(whole)[0]]
    assert list(short) == []  # it has ended; the other continues with the same weights
    with pytest.raises(ConfigError, match=r"predict_batches .* before training"):
        trainer.train(1)
    found += [outputs for outputs, _ in whole]
    np.testing.assert_array_equal(np.concatenate(found), expected)
    for one, other in zip(trainer.model.get_weights(), own, strict=True):
        np.testing.assert_array_equal(one, other)

    opened = []

    def keep(step):
        opened.append(trainer.predict_batches(IMAGES))
        next(opened[-1])

    with pytest.raises(ConfigError, match=r"predict_batches .* before training"):
        trainer.train(3, [EachLoop(keep)])
    assert len(opened) == 1  # it does not train on from the averages
    opened[0].close()
    trainer.train(1)


class WithoutOutputs:
    def __init__(self, model):
        self.model = model

    def per_example(self, features, training):
        outputs = self.model(features["image"])[:, 0]
        return ddl.PerExample(tf.square(outputs - tf.cast(features["label"], tf.float32)))


class Mean(WithoutOutputs):
    def predict(self, features):
        return tf.reduce_mean(self.model(features["image"]))


class OtherFeature(WithoutOutputs):
    def predict(self, features):
        return self.model(features["pixels"])


@pytest.mark.parametrize(
    ("task", "data", "error", "message"),
    [
        (WithoutOutputs, DATA, ConfigError, "WithoutOutputs has no outputs to predict. Give it"),
        (Mean, DATA, ConfigError, r"first dimension is the batch, 8, got shape \(\)"),
        (Mean, IMAGES, DataError, "Mean does not name its input"),
        (OtherFeature, DATA, DataError, "reads the feature 'pixels', but the data have only image"),
        (ddl.Classification, {"label": LABELS}, DataError, "reads the feature 'image'"),
        (ddl.Classification, IMAGES[:, :2], DataError, r"shape \(3,\), .* got \(2,\). Reshape"),
        (ddl.Classification, "image", DataError, "must be arrays or a reader"),
        (ddl.Classification, True, ConfigError, "predict takes a data set, got True"),
    ],
)
def test_what_cannot_be_predicted(task, data, error, message):
    trainer = make_trainer(make_strategy("one_device", 1), task)
    with pytest.raises(error, match=message):
        trainer.predict(data)


def test_a_text_is_not_read_letter_by_letter(trainer):
    with pytest.raises(ConfigError, match="features must be a list, got the text 'label'"):
        next(trainer.predict_batches(DATA, features="label"))


def named(*classes):
    source = ddl.data.as_source({"image": IMAGES, "label": LABELS})
    source.items.class_names = classes
    return source


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (named("dog", "cat"), "classes cat, dog, evaluation data dog, cat"),
        ({"image": IMAGES}, "no feature 'label'"),
        ({"image": IMAGES[:, :2], "label": LABELS}, r"has shape \(2,\), but the model"),
        ({"image": IMAGES, "label": LABELS + 1}, "Labels must be from 0 to 1"),
    ],
)
def test_given_data_of_another_form_are_refused(trainer, data, message, monkeypatch):
    items = trainer.pipelines[""].source.items
    monkeypatch.setattr(items, "class_names", ("cat", "dog"), raising=False)
    with pytest.raises(DataError, match=message):
        trainer.evaluate(data)


def test_a_warning_of_integers_for_floats(trainer, caplog):
    """As of pixels that were scaled in the training data alone."""
    raw = {"image": (10 * IMAGES).astype("i4"), "label": LABELS}
    for call in (trainer.evaluate, trainer.predict):
        call({"image": IMAGES.astype("f8"), "label": LABELS.astype("u1")})
        assert not caplog.messages
        call(raw)
        (message,) = caplog.messages
        assert "'image' is float32 in the training data, but int32 in other data" in message
        caplog.clear()
