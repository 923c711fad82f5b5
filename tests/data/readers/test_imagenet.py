"""Small files in the format of the real ones: names, records, JPEGs of any sizes, labels from 1."""

import numpy as np
import pytest
import tensorflow as tf

from ddl.data.readers.images import imagenet
from ddl.errors import ConfigError, DataError
from tests.data.decoding import examples

EACH, SHARDS = 5, 3
SHAPE = (16, 16, 3)


def write(folder, kind="train"):
    """Gray images, brighter by their number, blue in their left half, of many sizes."""
    for shard in range(SHARDS):
        with tf.io.TFRecordWriter(str(folder / f"{kind}-{shard:05d}-of-{SHARDS:05d}")) as file:
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


def test_training_images_are_cropped_and_mirrored_by_the_seed(tmp_path):
    write(tmp_path)
    source = imagenet("train", tmp_path, image_shape=SHAPE)
    assert source.element_spec["image"] == tf.TensorSpec(SHAPE, tf.uint8, "image")
    left, right = 0, 0
    for draw in range(12):
        for number, example in enumerate(examples(source, seed=(draw, 7))):
            assert example["label"] == number
            # A picture is of one gray, which JPEG and resizing keep within a unit or two.
            np.testing.assert_allclose(example["image"][..., 0].mean(), 12 * number, atol=3)
            blue = example["image"][..., 2].mean(0).astype(int)
            left += blue[0] > blue[-1] + 20
            right += blue[0] < blue[-1] - 20
    # Crops that show the edge, some of 180; half of them are five standard deviations from a third.
    assert left + right > 100
    assert 1 / 3 < left / (left + right) < 2 / 3


def test_test_images_are_the_middle_and_need_no_seed(tmp_path):
    write(tmp_path, "validation")
    source = imagenet("test", tmp_path, image_shape=(8, 14, 3))
    for one, other in zip(examples(source), examples(source, seed=(3, 4)), strict=True):
        np.testing.assert_array_equal(one["image"], other["image"])
        blue = one["image"][..., 2].astype(int)
        # The edge of blue is in the middle.
        assert abs(blue[:, :5].mean() - 255) < 12
        assert abs(blue[:, -5:].mean() - 12 * int(one["label"])) < 12


def test_missing_files_are_described(tmp_path):
    with pytest.raises(DataError, match=r"data_dir is not set\. Put its TFRecord files"):
        imagenet("train", None)
    with pytest.raises(DataError, match=r"no file matches .*validation-\*-of-\*\. Put"):
        imagenet("test", tmp_path)
    write(tmp_path)
    (tmp_path / "train-00001-of-00003").unlink()
    with pytest.raises(DataError, match="missing, such as .*train-00001-of-00003"):
        imagenet("train", tmp_path)


def test_another_shape_or_split_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="3 channels"):
        imagenet("train", tmp_path, image_shape=(16, 16, 1))
    with pytest.raises(ConfigError, match="'validation'"):
        imagenet("validation", tmp_path)
