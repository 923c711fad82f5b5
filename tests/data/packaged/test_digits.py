import hashlib
from importlib import resources

import numpy as np
import pytest

from ddl.data import load_digits
from ddl.errors import DataError


def test_counts_shapes_and_ranges():
    counts = {
        "train": [142, 145, 142, 146, 145, 146, 145, 143, 139, 144],
        "test": [36, 37, 35, 37, 36, 36, 36, 36, 35, 36],
    }
    for split, expected in counts.items():
        images, labels = load_digits(split)
        assert images.shape == (sum(expected), 8, 8, 1)
        assert images.dtype == np.uint8
        assert (images.min(), images.max()) == (0, 16)
        assert labels.dtype == np.int64
        assert np.bincount(labels).tolist() == expected


def test_no_image_is_in_both_parts():
    train, test = (load_digits(split)[0] for split in ("train", "test"))
    rows = {image.tobytes() for image in train}
    assert len(rows) == 1437
    assert not rows & {image.tobytes() for image in test}


def test_a_damaged_file_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(resources, "files", lambda package: tmp_path)
    with pytest.raises(DataError, match="could not be read"):
        load_digits("train")
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "digits.npz").write_bytes(b"PK")
    with pytest.raises(DataError, match=hashlib.sha256(b"PK").hexdigest()):
        load_digits("train")


def test_both_parts_together_are_the_published_set():
    with resources.files("ddl.data").joinpath("files", "digits.npz").open("rb") as file:
        arrays = dict(np.load(file))
    rows = np.concatenate([arrays["train_row"], arrays["test_row"]])
    assert sorted(rows) == list(range(1797))
    images = np.concatenate([arrays["train_image"], arrays["test_image"]])[np.argsort(rows)]
    assert hashlib.sha256(images.tobytes()).hexdigest() == (
        "8f26b2bd9d135c256808f68f14fdabddde6d9c7f869ae419704b051f0f14b3b3"
    )
