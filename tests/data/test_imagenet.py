"""Small files in the format of the real ones: names, records, JPEGs of any sizes, labels from 1."""

import numpy as np
import pytest
import tensorflow as tf

from ddl.data import imagenet, images
from ddl.errors import ConfigError, DataError

EACH = 5
SHAPE = (16, 16, 3)


def write(folder, kind="train", shards=3, left_out=()):
    """Flat grey images, brighter by their number, a blue edge on the left, of many sizes."""
    for shard in range(shards):
        if shard in left_out:
            continue
        with tf.io.TFRecordWriter(str(folder / f"{kind}-{shard:05d}-of-{shards:05d}")) as file:
            for place in range(EACH):
                number = shard * EACH + place
                pixels = np.full((40 + 7 * place, 64 - 5 * place, 3), 12 * number, np.uint8)
                pixels[:, : pixels.shape[1] // 2, 2] = 255
                jpeg = tf.io.encode_jpeg(pixels, quality=100).numpy()
                features = {
                    "image/encoded": tf.train.Feature(bytes_list=tf.train.BytesList(value=[jpeg])),
                    "image/class/label": tf.train.Feature(
                        int64_list=tf.train.Int64List(value=[number + 1])
                    ),
                }
                example = tf.train.Example(features=tf.train.Features(feature=features))
                file.write(example.SerializeToString())


def read(source, first=0, count=3, batch=EACH, seed=0, shuffle=True):
    batches = source.batches(batch, first, seed=seed, shuffle=shuffle).take(count)
    return [{name: value.numpy() for name, value in each.items()} for each in batches]


def labels_of(batches):
    return [int(label) for batch in batches for label in batch["label"]]


def test_an_epoch_has_each_image_once_in_an_order_of_its_own(tmp_path, monkeypatch):
    write(tmp_path)
    monkeypatch.setitem(imagenet.__globals__["_EXAMPLES"], "train", 15)
    source = imagenet("train", tmp_path, image_shape=SHAPE)
    first, second = labels_of(read(source)), labels_of(read(source, first=3))
    assert sorted(first) == sorted(second) == list(range(15))
    assert first != second
    assert first != list(range(15))


def test_a_part_of_the_images_is_the_same_in_each_epoch(tmp_path):
    write(tmp_path)
    source = imagenet("train", tmp_path, image_shape=SHAPE, num_examples=10)
    first, second = (labels_of(read(source, first, count=2)) for first in (0, 2))
    assert len(set(first)) == 10
    assert set(first) == set(second)
    assert first != second


def test_images_belong_to_their_labels_and_are_mirrored_half_of_the_time(tmp_path):
    write(tmp_path)
    source = imagenet("train", tmp_path, image_shape=SHAPE, num_examples=15)
    left, right = 0, 0
    for batch in read(source, count=36):
        assert batch["image"].shape == (EACH, *SHAPE)
        assert batch["image"].dtype == np.uint8
        red = batch["image"][..., 0].mean((1, 2))
        # A picture is of one grey, which JPEG and resizing keep within a unit or two.
        np.testing.assert_allclose(red, 12 * batch["label"], atol=3)
        blue = batch["image"][..., 2].mean(1).astype(int)
        left += np.count_nonzero(blue[:, 0] > blue[:, -1] + 20)
        right += np.count_nonzero(blue[:, 0] < blue[:, -1] - 20)
    # Crops that show the edge, some of 180; half of them are five standard deviations from a third.
    assert left + right > 100
    assert 1 / 3 < left / (left + right) < 2 / 3


def test_crops_follow_from_seed_and_epoch_wherever_reading_begins(tmp_path):
    write(tmp_path)
    source = imagenet("train", tmp_path, image_shape=SHAPE, num_examples=15)
    straight, again, other = (
        read(source, count=5, seed=3),
        read(source, first=3, count=2, seed=3),
        read(source, count=5, seed=4),
    )
    for one, same in zip(straight[3:], again, strict=True):
        np.testing.assert_array_equal(one["image"], same["image"])
    assert any((a["image"] != b["image"]).any() for a, b in zip(straight, other, strict=True))


def test_the_test_set_is_the_middle_in_the_files_order(tmp_path):
    write(tmp_path, "validation", shards=1)
    source = imagenet("test", tmp_path, image_shape=SHAPE, num_examples=EACH)
    (batch,) = read(source, count=1, shuffle=False)
    assert labels_of([batch]) == list(range(EACH))
    blue = batch["image"][..., 2]
    assert (blue[:, :, :6] > 240).all()  # neither moved nor mirrored
    assert (blue[:, :, 10:] < 60).all()


def test_images_knows_it_by_name(tmp_path):
    write(tmp_path)
    arguments = {"image_shape": SHAPE, "num_examples": 15, "data_dir": str(tmp_path)}
    source = images("imagenet", "train", num_classes=1000, **arguments)
    assert len(source) == 15
    with pytest.raises(DataError, match="1,000 classes"):
        images("imagenet", "train", num_classes=10, **arguments)


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda folder: None, r"no file matches .*train-\*-of-\*"),
        (
            lambda folder: write(folder, left_out=(1,)),
            "matches 2 files, which are not a complete set",
        ),
    ],
)
def test_missing_files_are_told(tmp_path, prepare, message):
    prepare(tmp_path)
    with pytest.raises(DataError, match=message) as told:
        imagenet("train", tmp_path)
    assert "train-00000-of-01024" in str(told.value)
    with pytest.raises(DataError, match="data_dir is not set"):
        imagenet("train", None)


def test_fewer_examples_than_announced_are_told(tmp_path):
    write(tmp_path)
    with pytest.raises(DataError, match="at most 15, .* 3 files, got 1,281,167"):
        imagenet("train", tmp_path, image_shape=SHAPE)


def test_other_channels_are_told(tmp_path):
    with pytest.raises(ConfigError, match="3 channels, but image_shape has 1"):
        imagenet("train", tmp_path, image_shape=(16, 16, 1))
