"""Mixup and CutMix against references in numpy, given the draws; partners and shares."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.checkpoints.checkpoints import Checkpoints
from ddl.errors import ConfigError
from ddl.layers.transforms.mixing import partners
from ddl.precision import set_precision
from tests.conftest import make_strategy, microbatch, save
from tests.layers.given_draws import GivenDraws

ROWS = 8
IMAGES = np.random.default_rng(0).integers(0, 256, (ROWS, 6, 5, 2)).astype("u1")
LABELS = np.arange(ROWS)
NEIGHBOURS = np.arange(ROWS) ^ 1


def mixed(layer, rows=slice(None), first_row=0, images=IMAGES, **options):
    images, labels = images[rows], LABELS[rows]
    with microbatch(first_row, len(images), **options).forward():
        return layer(images, labels)


def test_the_partner_is_the_neighbour():
    result = mixed(ddl.layers.Mixup(seed=1))
    np.testing.assert_array_equal(result.partner_labels, NEIGHBOURS)
    np.testing.assert_array_equal(result.labels, LABELS)


@pytest.mark.parametrize("dtype", ["uint8", "int32", "float16", "float32", "float64"])
def test_mixup(monkeypatch, dtype):
    draws = GivenDraws(monkeypatch)
    images = IMAGES.astype(dtype)
    result = ddl.layers.Mixup(alpha=1.0)(images, LABELS)
    (share,) = draws.drawn
    np.testing.assert_array_equal(result.share, share)
    weight = share.astype("f8").reshape(-1, 1, 1, 1)
    expected = weight * images.astype("f8") + (1 - weight) * images[NEIGHBOURS].astype("f8")
    assert result.images.dtype == dtype
    tolerance = {"float16": 0.1, "float32": 1e-4, "float64": 1e-12}.get(dtype, 0.501)
    np.testing.assert_allclose(result.images, expected, atol=tolerance)


@pytest.mark.parametrize("dtype", ["uint8", "float64"])
def test_cutmix(monkeypatch, dtype):
    draws = GivenDraws(monkeypatch)
    images = IMAGES.astype(dtype)
    result = ddl.layers.CutMix(probability=0.7)(images, LABELS)
    chosen, share, place = draws.drawn
    assert 0 < (chosen < 0.7).sum() < ROWS
    for row in range(ROWS):
        own = share[row] if chosen[row] < 0.7 else 1.0
        expected = images[row].copy()
        ends = []
        for size, middle in zip((6, 5), place[row], strict=True):
            reach, centre = int(size * np.sqrt(1 - own)) // 2, int(middle * size)
            ends.append((max(centre - reach, 0), min(centre + reach, size)))
        (top, bottom), (left, right) = ends
        expected[top:bottom, left:right] = images[row ^ 1, top:bottom, left:right]
        np.testing.assert_array_equal(result.images[row], expected)
        replaced = (bottom - top) * (right - left) / 30
        assert float(result.share[row]) == pytest.approx(1 - replaced, abs=1e-6)
    assert result.images.dtype == dtype


every_layer = pytest.mark.parametrize("make", [ddl.layers.Mixup, ddl.layers.CutMix])


@every_layer
def test_replicas_mix_as_one_device_does(make):
    layer = make(alpha=0.7, probability=0.8)
    whole = mixed(layer)
    assert len(np.unique(whole.share)) > 3
    for first in (0, 4):
        part = mixed(layer, slice(first, first + 4), first)
        for one, of_part in zip(whole, part, strict=True):
            np.testing.assert_array_equal(of_part, one[first : first + 4])
    assert (mixed(layer, batch=4).images.numpy() != whole.images.numpy()).any()


@every_layer
def test_padding_is_no_partner(make):
    mask = np.arange(ROWS) != 3
    result = mixed(make(alpha=1.0), mask=mask)
    np.testing.assert_array_equal(result.share[2], 1)
    np.testing.assert_array_equal(result.images[2], IMAGES[2])
    assert (result.share.numpy()[[0, 1, 4, 5]] < 1).any()


@every_layer
def test_outside_of_training_nothing_is_mixed(make):
    result = make()(IMAGES, LABELS, training=False)
    np.testing.assert_array_equal(result.images, IMAGES)
    np.testing.assert_array_equal(result.share, np.ones(ROWS))


def test_an_odd_last_row_stays():
    result = mixed(ddl.layers.Mixup(1.0), slice(5))
    np.testing.assert_array_equal(result.share[4], 1)
    np.testing.assert_array_equal(result.images[4], IMAGES[4])


def test_refusals():
    layer = ddl.layers.Mixup()
    message = "each replica must have an even number of rows in a microbatch, got 3"
    with pytest.raises(ConfigError, match=message):
        mixed(layer, slice(3), first_row=3)
    with microbatch(rows=4).forward(), pytest.raises(ConfigError, match="4 examples, got 8 rows"):
        layer(IMAGES, LABELS)
    with pytest.raises(ConfigError, match="one static number of rows, got .* Keep one row"):
        partners([tf.ones([2]), tf.ones([3])], "A layer")
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    with pytest.raises(ConfigError, match="mixing must be ddl.layers.Mixup .*, got Keras's CutMix"):
        ddl.Classification(model, mixing=keras.layers.CutMix())
    for arguments in ({"alpha": 0}, {"alpha": float("inf")}, {"probability": 1.5}):
        with pytest.raises(ConfigError, match=f"Mixup.{next(iter(arguments))} must be"):
            ddl.layers.Mixup(**arguments)


def trained(layers, replicas, steps=4, microbatches=1):
    """Trains on 22 examples in batches of 8, so that the last batch holds six and padding."""
    random = np.random.default_rng(1)
    data = {"image": random.uniform(0, 255, (22, 6, 6, 3)), "label": np.arange(22) % 3}
    data["weight"] = np.where(np.arange(22) == 7, 0.0, 1.0)
    keras.utils.set_random_seed(0)
    set_precision("float64")
    strategy = make_strategy("mirrored" if replicas > 1 else "one_device", replicas)
    with strategy.scope():
        model = keras.Sequential([keras.Input((6, 6, 3)), keras.layers.Flatten()])
        model.add(keras.layers.Dense(3))
        task = ddl.Classification(model, **layers())
        trainer = ddl.Trainer(
            task,
            keras.optimizers.SGD(1e-5),
            data,
            global_batch_size=8,
            accumulation_steps=microbatches,
            seed=2,
            eval_data=data,
            strategy=strategy,
        )
    results = trainer.train(steps)
    return trainer, [*trainer.model.get_weights(), results["loss"], results["accuracy"]]


def with_mixup():
    layers = [
        ddl.layers.RandomResizedCrop(6, 6),
        keras.layers.RandomColorJitter(brightness_factor=0.4, hue_factor=0.2),
    ]
    return {"augmentations": layers, "mixing": ddl.layers.Mixup(0.4)}


def with_cutmix():
    return {"mixing": ddl.layers.CutMix(probability=0.5), "label_smoothing": 0.1, "top_k": 2}


@pytest.fixture(scope="module")
def on_one_device():
    return {make: trained(make, 1) for make in (with_mixup, with_cutmix)}


@pytest.mark.usefixtures("rows_checked_on_one_device")
@pytest.mark.parametrize(
    ("make", "replicas", "microbatches"),
    [(with_mixup, 2, 2), (with_cutmix, 2, 1)],
)
def test_the_same_training_on_any_number_of_devices(make, replicas, microbatches, on_one_device):
    _, expected = on_one_device[make]
    _, found = trained(make, replicas, microbatches=microbatches)
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_allclose(other, one, rtol=0, atol=1e-10)


def test_mixing_changes_training_and_not_evaluation(on_one_device):
    plain, weights = trained(dict, 1)
    for make in (with_mixup, with_cutmix):
        trainer, mixed_weights = on_one_device[make]
        assert abs(mixed_weights[0] - weights[0]).max() > 1e-4
    trainer, _ = trained(lambda: {"mixing": ddl.layers.Mixup(0.4)}, 1)
    trainer.model.set_weights(plain.model.get_weights())
    assert trainer.evaluate() == plain.evaluate()


def test_a_resumed_training_draws_the_same(on_one_device, tmp_path):
    trainer, _ = on_one_device[with_mixup]
    save(tmp_path, trainer)
    ends = []
    for _ in range(2):
        trainer.train(2)
        ends.append(trainer.model.get_weights())
        Checkpoints(tmp_path, trainer).restore_latest()
    for one, other in zip(*ends, strict=True):
        np.testing.assert_array_equal(one, other)


@every_layer
def test_compiled(make):
    layer, images = make(alpha=0.6, probability=0.7), IMAGES.astype("f4")

    def mix():
        with microbatch(rows=ROWS).forward():
            return layer(images, LABELS)

    expected, found = mix(), tf.function(mix, jit_compile=True)()
    np.testing.assert_allclose(found.share, expected.share, atol=1e-5)
    np.testing.assert_allclose(found.images, expected.images, atol=1e-2)


def test_the_loss_is_the_mean_for_both_labels():
    """With equal rows in each pair but for the label, mixing changes nothing else."""
    logits = np.random.default_rng(0).normal(size=(ROWS, 3)).astype("f4")
    images, labels = np.repeat(logits[::2], 2, axis=0), np.arange(ROWS) % 3
    model = keras.Sequential([keras.Input((3,)), keras.layers.Activation("linear")])
    features = {"image": tf.constant(images), "label": tf.constant(labels)}
    layer = ddl.layers.Mixup(1.0)
    task = ddl.Classification(model, mixing=layer, label_smoothing=0.1)
    with microbatch(rows=ROWS).forward():
        found = task.per_example(features, training=True)
    with microbatch(rows=ROWS).forward():
        share = layer(features["image"], features["label"]).share.numpy()
    plain = ddl.Classification(model, label_smoothing=0.1)
    own, other = (
        plain.per_example({"image": features["image"], "label": tf.constant(each)}, training=True)
        for each in (labels, labels[NEIGHBOURS])
    )
    for one, a, b in [
        (found.loss, own.loss, other.loss),
        (found.metrics["accuracy"], own.metrics["accuracy"], other.metrics["accuracy"]),
    ]:
        np.testing.assert_allclose(one, share * a + (1 - share) * b, atol=1e-6)
