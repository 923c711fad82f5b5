"""Images in one folder for each class."""

import numpy as np
import pytest
import tensorflow as tf

from ddl.data.readers.image_folder import image_folder
from ddl.errors import ConfigError, DataError
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


def test_images_of_the_size_are_kept_and_others_resized(tmp_path):
    write(tmp_path)
    board = (np.indices((15, 9)).sum(0) % 2 * 200)[..., np.newaxis].astype(np.uint8)
    (tmp_path / "dog/1.png").write_bytes(tf.io.encode_png(board).numpy())
    (same,) = examples(image_folder(tmp_path, (15, 9), channels=1), [2])
    np.testing.assert_array_equal(same["image"], board)
    (small,) = examples(image_folder(tmp_path, (5, 3), channels=1), [2])
    # Anti-aliasing averages the fields.
    np.testing.assert_allclose(small["image"].astype(int), np.full((5, 3, 1), 100), atol=20)


def test_decode_gets_image_label_and_seed(tmp_path):
    write(tmp_path)

    def decode(item, seed):
        crop = tf.image.stateless_random_crop(item["image"], [4, 4, 3], seed)
        return {"image": crop, "class": tf.one_hot(item["label"], 2)}

    (found,) = examples(image_folder(tmp_path, (6, 8), decode=decode), [2])
    assert found["image"].shape == (4, 4, 3)
    assert found["class"].tolist() == [0, 1]


@pytest.mark.parametrize("content", [b"<html>", b"", "half"])
def test_an_unreadable_image_is_named_with_its_file(tmp_path, content):
    write(tmp_path)
    file = tmp_path / "cat/deep/2.JPG"
    file.write_bytes(file.read_bytes()[:300] if content == "half" else content)
    source = image_folder(tmp_path, (6, 8))
    assert f"failed on {file}: " in str(source.undecodable(np.arange(3)))
    assert source.undecodable(np.array([0, 2])) is None


def test_files_of_other_formats_are_counted(tmp_path, caplog):
    write(tmp_path)
    (tmp_path / "cat/notes.txt").write_text("")
    image_folder(tmp_path, (6, 8))
    assert f"1 files left out, such as {tmp_path}/cat/notes.txt" in caplog.text


@pytest.mark.parametrize(
    ("gray", "folder", "message"),
    [
        ({}, "none", "No such file or directory.*none.*folder of images for each class"),
        ({}, "", "holds no folders"),
        ({"a.png": 0, "cat/1.png": 0}, "", r"holds 1 images, such as a\.png"),
        ({"cat/1.png": 0, "dog/1.txt": 0}, "", "dog must hold images .* 1 other files"),
    ],
)
def test_a_folder_that_does_not_fit_is_refused(tmp_path, gray, folder, message):
    write(tmp_path, gray)
    with pytest.raises(DataError, match=message):
        image_folder(tmp_path / folder, (6, 8))


@pytest.mark.parametrize(
    ("size", "channels"), [((6,), 3), ((6, 0), 3), ((6, 8), 2), ((6, 8, 3), 3)]
)
def test_a_size_out_of_range_is_refused(tmp_path, size, channels):
    with pytest.raises(ConfigError, match="image_folder needs size"):
        image_folder(tmp_path, size, channels=channels)
