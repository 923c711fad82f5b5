"""Small files in the format of the real ones: names, records, JPEGs of any sizes, labels from 1."""

import numpy as np
import pytest
import tensorflow as tf

from ddl.data.readers.images import imagenet
from ddl.errors import DataError
from tests.data.decoding import examples
from tests.data.readers.test_records import example

EACH, SHARDS = 5, 3
SHAPE = (16, 16, 3)


def write(folder, each=EACH):
    """Gray images, brighter by their number, blue in their left half, of many sizes."""
    for shard in range(SHARDS):
        with tf.io.TFRecordWriter(str(folder / f"train-{shard:05d}-of-{SHARDS:05d}")) as file:
            for place in range(each):
                number = shard * each + place
                pixels = np.full((40 + 7 * place, 64 - 5 * place, 3), 12 * number, np.uint8)
                pixels[:, : pixels.shape[1] // 2, 2] = 255
                jpeg = tf.io.encode_jpeg(pixels, quality=100).numpy()
                features = {"image/encoded": jpeg, "image/class/label": number + 1}
                file.write(example(features))


def test_training_images_are_cropped_and_mirrored_by_the_seed(tmp_path):
    write(tmp_path)
    source = imagenet("train", tmp_path, image_shape=SHAPE)
    assert source.element_spec["image"] == tf.TensorSpec(SHAPE, tf.uint8, "image")
    left, right = 0, 0
    for draw in range(12):
        for number, found in enumerate(examples(source, seed=(draw, 7))):
            assert found["label"] == number
            # A picture is of one gray, which JPEG and resizing keep within a unit or two.
            np.testing.assert_allclose(found["image"][..., 0].mean(), 12 * number, atol=3)
            blue = found["image"][..., 2].mean(0).astype(int)
            left += blue[0] > blue[-1] + 20
            right += blue[0] < blue[-1] - 20
    # Crops that show the edge, some of 180; half of them are five standard deviations from a third.
    assert left + right > 100
    assert 1 / 3 < left / (left + right) < 2 / 3


def test_missing_files_are_named_with_their_place(tmp_path):
    write(tmp_path, each=1)
    message = f"no file matches {tmp_path}/validation-.* Put its TFRecord files, .*data_dir"
    with pytest.raises(DataError, match=message):
        imagenet("test", tmp_path)
