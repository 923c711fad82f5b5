import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from ddl.data.formats import numpy_files, token_windows

from ddl import data
from ddl.data import ArraySource, RandomAccessSource
from ddl.data.checks import data_errors
from ddl.errors import ConfigError, DataError
from tests.conftest import make_strategy
from tests.data.test_records import taken

X, Y = np.arange(12.0).reshape(6, 2).astype(np.float32), np.arange(6)


@pytest.fixture
def files(tmp_path):
    np.save(tmp_path / "x.npy", X)
    np.save(tmp_path / "y.npy", Y)
    np.savez(tmp_path / "both.npz", x_train=X, y_train=Y)
    return {"x": str(tmp_path / "x.npy"), "label": str(tmp_path / "y.npy")}


@pytest.mark.parametrize("in_memory", [None, True, False])
def test_a_file_for_each_feature(files, in_memory):
    source = numpy_files(files, in_memory=in_memory)
    assert isinstance(source, RandomAccessSource if in_memory is False else ArraySource)
    (batch,) = taken(source, 1, batch=6, shuffle=False)
    np.testing.assert_array_equal(batch["x"], X)
    np.testing.assert_array_equal(batch["label"], Y)


def test_an_archive(files, tmp_path):
    assert {*numpy_files(tmp_path / "both.npz").features} == {"x_train", "y_train"}
    source = numpy_files(tmp_path / "both.npz", names={"image": "x_train", "label": "y_train"})
    np.testing.assert_array_equal(source.features["image"], X)


def test_bad_input(files, tmp_path):
    (tmp_path / "cut.npz").write_bytes((tmp_path / "both.npz").read_bytes()[:300])
    (tmp_path / "cut.npy").write_bytes((tmp_path / "x.npy").read_bytes()[:150])
    for name, save in (("flipped", np.savez), ("inflated", np.savez_compressed)):
        save(tmp_path / f"{name}.npz", x=X, y=Y)
        content = bytearray((tmp_path / f"{name}.npz").read_bytes())
        content[content.index(b"x.npy") + 25] ^= 255  # at the start of the array
        (tmp_path / f"{name}.npz").write_bytes(content)
    np.save(tmp_path / "objects.npy", np.array([{}, 1], object))
    np.save(tmp_path / "short.npy", Y[:5])
    np.save(tmp_path / "scalar.npy", np.float32(1))
    both = tmp_path / "both.npz"
    for call, error, message in [
        (lambda: numpy_files(tmp_path / "absent.npz"), DataError, "absent.npz could not be read"),
        (lambda: numpy_files(tmp_path / "cut.npz"), DataError, "cut.npz could .* numpy.savez"),
        (lambda: numpy_files(tmp_path / "flipped.npz"), DataError, r"flipped\.npz could not be"),
        (lambda: numpy_files(tmp_path / "inflated.npz"), DataError, r"inflated\.npz could not be"),
        (lambda: numpy_files(files["x"]), DataError, r"must be an .npz .* such as {'image': '.*'}"),
        (lambda: numpy_files(both, names={"x": "z"}), DataError, "no array 'z'; it holds x_train"),
        (lambda: numpy_files(both, in_memory=False), ConfigError, "cannot be memory-mapped"),
        (lambda: numpy_files(files, names={"x": "y"}), ConfigError, "names is for an .npz"),
    ]:
        with pytest.raises(error, match=message):
            call()
    for name, message in [
        ("cut", "cut.npy could not be read .* Correct numpy_files.files, .* numpy.save.$"),
        ("objects", "objects.npy could not be read"),
        ("scalar", r"must hold one array \[n, …\], .* got one number. Write it"),
        ("short", "same number of examples"),
        ("absent", "absent.npy could not be read"),
    ]:
        with pytest.raises(DataError, match=message):
            numpy_files({**files, "z": str(tmp_path / f"{name}.npy")}, in_memory=False)


def test_mapped_rows_are_gathered_in_the_file(tmp_path, monkeypatch):
    """Without a call of Python, and without a copy of the file; as Python's look-ups would."""
    x, y = np.arange(2048.0).reshape(1024, 2).astype(np.float32), np.arange(1024) % 3 == 0
    paths = {name: tmp_path / f"{name}.npy" for name in ("x", "y")}
    for name, array in (("x", x), ("y", y)):
        np.save(paths[name], array)
    source, looked_up = numpy_files(paths, in_memory=False), numpy_files(paths, in_memory=False)
    monkeypatch.setattr(sys.modules[numpy_files.__module__], "shared_tensor", lambda array: None)
    expected = taken(looked_up, 3, batch=7)
    monkeypatch.undo()
    monkeypatch.setattr(source, "_lookup", None)
    for batch, other in zip(taken(source, 3, batch=7), expected, strict=True):
        for name in ("x", "y", "weight"):
            np.testing.assert_array_equal(batch[name], other[name], err_msg=name)
    written = np.load(paths["x"], mmap_mode="r+")
    written[5] = 99  # is seen, since the tensor lies in the mapped file
    assert source.gather(tf.constant([5], tf.int64))["x"].numpy().tolist() == [[99, 99]]


def test_arrays_that_tensorflow_cannot_map_are_looked_up(tmp_path):
    """Columns that are stored one after the other, and text."""
    for array in (np.asfortranarray(np.arange(12.0).reshape(6, 2)), np.array(list("abcdef"))):
        np.save(tmp_path / "a.npy", array)
        source = numpy_files({"x": tmp_path / "a.npy"}, in_memory=False)
        (batch,) = taken(source, 1, batch=6, shuffle=False)
        assert batch["x"].astype(array.dtype).tolist() == array.tolist()


def test_a_mapped_row_with_nan_is_named(tmp_path):
    x = np.array(X)
    x[4, 1] = np.nan
    np.save(tmp_path / "x.npy", x)
    source = numpy_files({"x": tmp_path / "x.npy"}, in_memory=False)
    with pytest.raises(DataError, match="'x' must be finite, .* first in example 4"), data_errors():
        taken(source, 1, batch=6)


def _own_memory() -> int:
    """Returns the bytes of this process that no file holds."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("RssAnon:")[2].split()[0])


@pytest.mark.parametrize("of", ["arrays", "windows", "part", "mixture"])
def test_mapped_files_are_not_copied(tmp_path, of):
    """TensorFlow would copy what the maps of a data set capture, the whole file."""
    size = 200_000_000
    np.lib.format.open_memmap(tmp_path / "x.npy", "w+", np.uint8, (size // 100, 100)).flush()
    arrays = numpy_files({"x": str(tmp_path / "x.npy")}, in_memory=False)
    with open(tmp_path / "tokens", "wb") as file:
        file.truncate(size)
    source = {
        "arrays": lambda: arrays,
        "windows": lambda: token_windows(str(tmp_path / "tokens"), 99, dtype="uint8"),
        "part": lambda: data.k_fold(arrays, folds=2, fold=0, part="train"),
        "mixture": lambda: data.Mixture([arrays, arrays], [0.5, 0.5]),
    }[of]()
    before = _own_memory()
    pipeline = data.BatchPipeline(source, 10, resident=False)
    next(pipeline.iterator(make_strategy("one_device", 1)))
    assert _own_memory() - before < size / 2
