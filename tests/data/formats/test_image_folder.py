import numpy as np
import pytest
import tensorflow as tf
from absl import logging
from ddl.data.formats import ImageFolder

from ddl.data.checks import data_errors
from ddl.errors import ConfigError, DataError
from tests.data.test_records import taken

ENCODERS = {"png": tf.io.encode_png, "jpg": tf.io.encode_jpeg}


def write(file, value, size=(4, 5), channels=3):
    file.parent.mkdir(parents=True, exist_ok=True)
    pixels = tf.fill([*size, channels], tf.cast(value, tf.uint8))
    tf.io.write_file(str(file), ENCODERS[file.suffix[1:]](pixels))


@pytest.fixture
def folder(tmp_path):
    write(tmp_path / "dog" / "b.png", 20)
    write(tmp_path / "dog" / "a.jpg", 10)
    write(tmp_path / "cat" / "deep" / "c.png", 30, channels=1)
    write(tmp_path / "cat" / ".hidden.png", 1)
    (tmp_path / ".cache").mkdir()
    (tmp_path / "labels.txt").write_text("cat dog")
    return tmp_path


def test_labels_follow_from_the_folders_names(folder):
    source = ImageFolder(folder, (4, 5, 3))
    assert source.classes == ["cat", "dog"]
    (batch,) = taken(source, 1, batch=3, shuffle=False)
    assert batch["label"].tolist() == [0, 1, 1]
    assert batch["image"].shape == (3, 4, 5, 3)
    assert batch["image"].dtype == source.element_spec["image"].dtype == np.uint8
    assert batch["image"][:, 0, 0].tolist() == [[30] * 3, [10] * 3, [20] * 3]


def test_classes_may_have_another_order(folder):
    (batch,) = taken(ImageFolder(folder, (4, 5, 3), classes=["dog", "cat"]), 1, batch=3)
    found = dict(zip(batch["image"][:, 0, 0, 0].tolist(), batch["label"].tolist(), strict=True))
    assert found == {10: 0, 20: 0, 30: 1}


def test_a_class_that_is_named_may_be_missing(folder):
    """Such as in evaluation data."""
    (folder / "empty").mkdir()
    source = ImageFolder(folder, (4, 5, 3), classes=["bird", "cat", "dog", "empty"])
    (batch,) = taken(source, 1, batch=3, shuffle=False)
    assert batch["label"].tolist() == [1, 2, 2]


def test_grey_images(folder):
    (batch,) = taken(ImageFolder(folder, (4, 5, 1)), 1, batch=3)
    assert batch["image"].shape == (3, 4, 5, 1)


def test_images_of_another_size_are_resized_or_refused(folder):
    write(folder / "cat" / "large.png", 40, (8, 10))
    resized = ImageFolder(folder, (4, 5, 3), resize=True)
    (batch,) = taken(resized, 1, batch=4)
    assert sorted(batch["image"][:, 0, 0, 0].tolist()) == [10, 20, 30, 40]
    refused = r"The image .*\.(png|jpg) is 4×5 pixels, expected 8×10\. Set"
    with pytest.raises(DataError, match=refused), data_errors():
        taken(ImageFolder(folder, (8, 10, 3)), 1, batch=4)


def test_files_that_are_left_out_are_counted(folder, monkeypatch, tmp_path_factory):
    """They were left out in silence."""
    warnings = []
    monkeypatch.setattr(logging, "warning", lambda text, *values: warnings.append(text % values))
    assert len(ImageFolder(folder, (4, 5, 3))) == 3
    assert not warnings  # neither names that begin with a dot, nor files beside the classes
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    write(elsewhere / "d.png", 40)
    (folder / "dog" / "more").symlink_to(elsewhere)
    (folder / "bird").symlink_to(elsewhere)  # a class may be a link
    for name in ("1.webp", "2.WEBP", "README"):
        (folder / "cat" / "deep" / name).write_text("")
    assert len(ImageFolder(folder, (4, 5, 3))) == 4
    (text,) = warnings
    assert "4 files and linked folders" in text
    assert f"2 .webp (such as {folder}/cat/deep/1.webp), 1 files without an ending (su" in text
    assert f"1 linked folders (such as {folder}/dog/more)" in text
    (folder / "fox").mkdir()
    (folder / "fox" / "1.gif").write_text("")
    with pytest.raises(DataError, match=r"class 'fox', .* no images .*, but 1 \.gif \(such as"):
        ImageFolder(folder, (4, 5, 3))


@pytest.mark.parametrize("content", [b"", b"no image", b"\xff\xd8\xff\xe0 cut"])
def test_a_damaged_file_is_named(folder, content):
    (folder / "cat" / "damaged.jpg").write_bytes(content)
    source = ImageFolder(folder, (4, 5, 3))
    named = r"The first example that cannot be read is .*damaged\.jpg\."
    with pytest.raises(DataError, match=named), data_errors(source):
        taken(source, 1, batch=4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: (f / "empty").mkdir(), r"class 'empty', .*holds no images"),
        (lambda f: write(f / "loose.png", 1), "holds 1 images itself, such as loose.png"),
    ],
)
def test_folders_that_are_refused(folder, change, message):
    change(folder)
    with pytest.raises(DataError, match=message):
        ImageFolder(folder, (4, 5, 3))


def test_bad_input(folder, tmp_path):
    with pytest.raises(DataError, match=r"absent' could not be read: No such file"):
        ImageFolder(tmp_path / "absent", (4, 5, 3))
    with pytest.raises(DataError, match="holds no folders"):
        ImageFolder(tmp_path / ".cache", (4, 5, 3))
    with pytest.raises(DataError, match=r"leaves out cat\. Its .* bird, dog. Add those"):
        ImageFolder(folder, (4, 5, 3), classes=["bird", "dog"])
    with pytest.raises(ConfigError, match="classes must be a list, got the text 'cat'"):
        ImageFolder(folder, (4, 5, 3), classes="cat")
    with pytest.raises(DataError, match=r"each class once, got '.*' several times. Remove"):
        ImageFolder(folder, (4, 5, 3), classes=["cat", "dog", "cat"])
    (tmp_path / "other" / "cat").mkdir(parents=True)
    with pytest.raises(DataError, match="hold no images"):
        ImageFolder(tmp_path / "other", (4, 5, 3), classes=["cat"])
    for shape in [(4, 5), (4, 5, 2), (0, 5, 3)]:
        with pytest.raises(ConfigError, match="1, 3 or 4 channels"):
            ImageFolder(folder, shape)


@pytest.mark.parametrize("batch", [1, 3])
def test_a_subclass_may_change_the_examples(folder, batch):
    class Halved(ImageFolder):
        def example(self, index, seed):
            features = super().example(index, seed)
            return {"image": features["image"] // 2, "label": index + 7}

    batches = taken(Halved(folder, (4, 5, 3)), 3 // batch, batch=batch, shuffle=False)
    assert [x for each in batches for x in each["image"][:, 0, 0, 0]] == [15, 5, 10]
    assert [x for each in batches for x in each["label"]] == [7, 8, 9]
