"""Images in one folder for each class."""

import numpy as np
import pytest
import tensorflow as tf

from ddl.data.readers.images import image_folder
from ddl.errors import DataError
from tests.data.decoding import examples

GRAY = {"dog/1.png": 10, "cat/deep/2.JPG": 60, "cat/3.bmp": 110, "dog/.hidden.png": 0}


def write(folder, gray=GRAY, size=(6, 8)):
    for name, value in gray.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.full((*size, 3), value, np.uint8)
        # The content tells the format, not the name.
        encode = tf.io.encode_png if name.endswith("png") else tf.io.encode_jpeg
        path.write_bytes(encode(pixels).numpy())


def test_images_carry_the_label_of_their_folder(tmp_path):
    write(tmp_path)
    source = image_folder(tmp_path, (6, 8))
    found = examples(source)
    assert [file.rsplit("/", 1)[1] for file in source.files] == ["3.bmp", "2.JPG", "1.png"]
    assert [one["label"] for one in found] == [0, 0, 1]
    assert [int(one["image"].mean()) for one in found] == [110, 60, 10]
    assert source.element_spec["image"] == tf.TensorSpec([6, 8, 3], tf.uint8, "image")
    (tmp_path / "fish").mkdir()
    with pytest.raises(DataError, match="/fish must hold images .*, but holds 0 other files"):
        image_folder(tmp_path, (6, 8))
