import numpy as np
import tensorflow as tf

from ddl.data.viewing import as_png, as_text, counts_of, described, is_picture, rows_as_text

BATCH = {
    "image": 2 * np.arange(3 * 32, dtype=np.uint8).reshape(3, 4, 8, 1),
    "label": np.array([2, 0, 2]),
    "name": np.array([b"a", "é".encode(), b"c\xff"], object),
    "x": np.array([[0.5, 1.5]] * 3),
    "flag": np.array([True, False, True]),
}


def test_features_are_described():
    lines = described(BATCH)
    assert lines[0].split() == ["feature", "dtype", "shape", "values"]
    found = {line.split()[0]: line for line in lines[1:]}
    assert "uint8" in found["image"]
    assert "[4, 8, 1]" in found["image"]
    assert found["image"].endswith("0 to 190, mean 95")
    assert found["name"].endswith("1 to 2 bytes")
    assert found["flag"].endswith("67% true")


def test_labels_are_counted():
    assert counts_of(BATCH) == ["label: 0 × 1, 2 × 2", "flag: False × 1, True × 2"]
    assert not counts_of({"id": np.arange(100)})


def test_rows():
    assert rows_as_text({k: BATCH[k] for k in ("label", "name", "x")}, 1) == [
        "label: 0",
        "name: 'é'",
        "x: [0.5 1.5]",
    ]
    assert rows_as_text(BATCH, 2)[2] == r"name: 'c\\xff'"
    assert len(rows_as_text({"long": np.zeros([1, 10]) / 3}, 0)[0]) < 90


def test_pictures():
    assert [name for name, values in BATCH.items() if is_picture(values)] == ["image"]
    grid = tf.io.decode_png(as_png(BATCH["image"], columns=2)).numpy()
    assert grid.shape == (9, 17, 1)
    np.testing.assert_array_equal(grid[:4, 9:], BATCH["image"][1])
    np.testing.assert_array_equal(grid[5:, :8], BATCH["image"][2])
    stretched = tf.io.decode_png(as_png(np.linspace(-1, 1, 16).reshape(1, 4, 4, 1))).numpy()
    assert (stretched.min(), stretched.max()) == (0, 255)


def test_an_image_as_characters():
    image = np.zeros([4, 4, 3], np.uint8)
    image[0] = 255
    assert as_text(image) == ["@@@@", "    ", "    ", "    "]
    large = as_text(np.zeros([100, 64, 1]), columns=32)
    assert (len(large), len(large[0])) == (25, 32)
