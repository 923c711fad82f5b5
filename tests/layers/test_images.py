"""Shifts, crops, Mixup and CutMix. tests/layers/test_random_layers.py trains with them."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.errors import ConfigError
from tests.conftest import microbatch

ROWS = 8
IMAGES = np.random.default_rng(0).integers(0, 256, (ROWS, 6, 5, 2)).astype("u1")
LABELS = np.arange(ROWS)

every_mixing = pytest.mark.parametrize("make", [ddl.layers.Mixup, ddl.layers.CutMix])


def mixed(layer, rows=slice(None), first_row=0, images=IMAGES, **options):
    images, labels = images[rows], LABELS[rows]
    with microbatch(first_row, len(images), **options).forward():
        return layer(images, labels)


@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_mixup_is_the_weighted_mean_with_the_neighbour(dtype):
    images = IMAGES.astype(dtype)
    result = mixed(ddl.layers.Mixup(1.0), images=images)
    weight = result.share.numpy().reshape(-1, 1, 1, 1)
    expected = weight * images + (1 - weight) * images[LABELS ^ 1]
    assert result.images.dtype == dtype
    np.testing.assert_array_equal(result.partner_labels, LABELS ^ 1)
    np.testing.assert_allclose(result.images, expected, atol=0.501 if dtype == "uint8" else 1e-4)


def test_cutmix_pastes_a_rectangle_of_the_neighbour():
    images = np.broadcast_to(LABELS.reshape(-1, 1, 1, 1), (ROWS, 60, 50, 1)).astype("f4")
    result = mixed(ddl.layers.CutMix(), images=images)
    for row, image in enumerate(result.images.numpy()[..., 0]):
        pasted = image != row
        assert set(image[pasted]) <= {row ^ 1}
        down, across = pasted.any(1), pasted.any(0)
        np.testing.assert_array_equal(pasted, down[:, np.newaxis] & across)
        assert float(result.share[row]) == pytest.approx(1 - pasted.mean(), abs=1e-6)
    assert len(np.unique(result.share)) > 3


@every_mixing
def test_replicas_mix_as_one_device_does_and_padding_is_no_partner(make):
    layer, mask = make(alpha=0.7, probability=0.8), np.arange(ROWS) != 3
    whole = mixed(layer, mask=mask)
    part = mixed(layer, slice(4, 8), 4, mask=mask[4:])
    for one, of_part in zip(whole, part, strict=True):
        np.testing.assert_array_equal(of_part, one[4:])
    np.testing.assert_array_equal(whole.images[2], IMAGES[2])
    np.testing.assert_array_equal(layer(IMAGES, LABELS, training=False).images, IMAGES)


def test_the_loss_is_the_mean_for_both_labels():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Activation("linear")])
    logits = np.random.default_rng(0).normal(size=(ROWS, 3)).astype("f4").repeat(2, axis=0)[:ROWS]
    features = {"image": tf.constant(logits), "label": tf.constant(LABELS % 3)}
    layer = ddl.layers.Mixup(1.0)
    with microbatch(rows=ROWS).forward():
        found = ddl.Classification(model, mixing=layer).per_example(features, training=True).loss
    with microbatch(rows=ROWS).forward():
        share = layer(features["image"], features["label"]).share.numpy()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)
    own, other = (loss(each % 3, logits) for each in (LABELS, LABELS ^ 1))
    np.testing.assert_allclose(found, share * own + (1 - share) * other, atol=1e-6)


def test_shifts_by_whole_pixels_each_way_and_zeros_come_in():
    images = IMAGES.repeat(8, axis=0)
    with microbatch(rows=64).forward():
        moved = ddl.layers.RandomShift(2, 1)(images, training=True).numpy()
    padded = np.pad(images, [(0, 0), (2, 2), (1, 1), (0, 0)])
    found = set()
    for image, source in zip(moved, padded, strict=True):
        crops = {(y, x): source[y : y + 6, x : x + 5] for y in range(5) for x in range(3)}
        found.add(next(place for place, crop in crops.items() if (crop == image).all()))
    assert len(found) > 10


def test_a_crop_is_resized_in_proportion():
    """A row of an image whose values are its columns has equal steps."""
    columns = np.broadcast_to(np.arange(90.0)[:, np.newaxis], (ROWS, 70, 90, 1))
    layer = ddl.layers.RandomResizedCrop(6, 5, scale=(0.2, 0.5), ratio=(1, 1))
    with microbatch(rows=ROWS).forward():
        rows = layer(columns.astype("f8"), training=True).numpy()[:, 3, :, 0]
    steps = np.diff(rows)
    np.testing.assert_allclose(steps, steps[:, :1].repeat(4, 1), atol=1e-4)
    sides = 5 * steps[:, 0]  # of squares
    assert (sides > np.sqrt(0.2 * 6300) - 1).all()
    assert (sides < np.sqrt(0.5 * 6300) + 1).all()
    assert len(np.unique(sides)) > 3
    assert layer(IMAGES, training=False).shape == (ROWS, 6, 5, 2)


def test_an_odd_number_of_rows_on_a_replica_is_refused():
    with pytest.raises(ConfigError, match="must have an even number of rows"):
        mixed(ddl.layers.Mixup(), slice(3), first_row=3)
