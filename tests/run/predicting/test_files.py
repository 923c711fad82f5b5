"""Files of predictions: their formats, and the folder that a killed command leaves. No training."""

import json
import os
import sys
import tracemalloc

import numpy as np
import pytest
import tensorflow as tf
from ddl.run.predicting.columns import columns_of, forms_of
from ddl.run.predicting.part_files import packed
from ddl.run.predicting.parts import PartialFile
from pyarrow import parquet

from ddl.errors import ConfigError, DataError, ModelDirectoryError, NotReady
from ddl.run.predicting import formats

ROWS, BATCH = 11, 4
DTYPES = ("bool", "int8", "uint8", "int32", "int64", "uint64", "float16", "float32", "float64")


def limits(dtype, rows):
    """The largest and the smallest value in turn."""
    info = {"b": lambda d: (True, False), "f": lambda d: (np.finfo(d).max, np.finfo(d).tiny)}
    high, low = info.get(np.dtype(dtype).kind, lambda d: (np.iinfo(d).max, np.iinfo(d).min))(dtype)
    return np.array([high, low] * rows, dtype)[:rows]


EXPECTED = {
    "name": np.array([f"ä/{n}" * n for n in range(ROWS)]),
    "name.lengths": np.ones(ROWS, np.int64),  # not those of the texts
    "special": np.array([[np.nan, np.inf], [-np.inf, 0.1]] * ROWS, "f4")[:ROWS],
    "scores/0": np.arange(ROWS * 6, dtype="f4").reshape(ROWS, 2, 3) / 7,
    "scores/1": np.arange(ROWS, dtype="f4") / 3,
    **{dtype: limits(dtype, ROWS) for dtype in DTYPES},
}


def batches():
    """The batches of EXPECTED, as a task returns them: text as bytes, bfloat16, a tuple."""
    for first in range(0, ROWS, BATCH):
        one = {name: values[first : first + BATCH] for name, values in EXPECTED.items()}
        features = {"name": np.array([text.encode() for text in one.pop("name")], object)}
        scores = one.pop("scores/0"), one.pop("scores/1")
        yield first, columns_of({**one, "scores": scores}, features, first)


def written(path, at_once, identity="same"):
    """Writes the file from parts of `at_once` batches each."""
    file = PartialFile(path)
    file.open({"weights": identity})
    there = list(batches())
    columns = forms_of(there[0][1])
    file.write_columns(columns)
    for start in range(0, len(there), at_once):
        joined = [one for _, one in there[start : start + at_once]]
        part = {name: np.concatenate([one[name] for one in joined]) for name in joined[0]}
        file.add(there[start][0], part)
    assert file.rows(BATCH, ROWS) == ROWS
    file.complete(file.columns(), ROWS)
    file.close()
    return path.read_bytes()


def read_json(path):
    """As any reader of JSON does: 1e999 is infinity, null is missing."""
    lines = [json.loads(line, parse_constant=pytest.fail) for line in path.open()]
    return {
        name: np.array([line[name] for line in lines], values.dtype)
        for name, values in EXPECTED.items()
    }


def read_parquet(path):
    table = parquet.read_table(path)
    return {
        name: np.array(table.column(name).to_pylist(), values.dtype)
        for name, values in EXPECTED.items()
    }


READ = {".jsonl": read_json, ".npz": lambda path: dict(np.load(path)), ".parquet": read_parquet}


@pytest.mark.parametrize("ending", READ)
def test_every_value_comes_back_whatever_the_parts(tmp_path, ending, monkeypatch):
    monkeypatch.setattr(formats, "_GROUP_ROWS", 5)
    contents = {written(tmp_path / f"{n}{ending}", at_once=n) for n in (1, 2, 3)}
    assert len(contents) == 1
    found = READ[ending](tmp_path / f"1{ending}")
    for name, values in EXPECTED.items():
        assert found[name].shape == values.shape
        np.testing.assert_array_equal(found[name], values, err_msg=name)
    if ending == ".parquet":
        assert parquet.ParquetFile(tmp_path / "1.parquet").num_row_groups == 3
    if ending == ".npz":
        assert {name: one.dtype for name, one in found.items()} == {
            name: one.dtype for name, one in EXPECTED.items()
        }
    assert {path.suffix for path in tmp_path.iterdir()} == {ending}


@pytest.mark.parametrize("ending", READ)
def test_the_memory_does_not_grow_with_the_rows(tmp_path, ending, monkeypatch):
    monkeypatch.setattr(formats, "_GROUP_ROWS", 300)

    def peak(file: PartialFile, parts: int) -> int:
        rows = 1 << 9
        file.open({})
        part = {"output": np.zeros([rows, 20], "f4")}
        file.write_columns(forms_of(part))
        for number in range(parts):
            file.add(number * rows, part)
        tracemalloc.start()
        file.complete(file.columns(), parts * rows)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        file.close()
        return peak

    # The least of some tries: threads of other tests may allocate meanwhile.
    of_four, of_twelve = (
        min(peak(PartialFile(tmp_path / f"{parts}-{n}{ending}"), parts) for n in range(3))
        for parts in (4, 12)
    )
    assert of_twelve < 1.3 * of_four


@pytest.mark.parametrize("ending", READ)
def test_one_long_text_does_not_widen_the_others(tmp_path, ending):
    """Their numpy array has 100 MB; .npz has this array on disk, but never in memory."""
    rows = 512
    texts = np.array(["x" * 12] * (rows - 1) + ["y" * 50_000], object)
    file = PartialFile(tmp_path / f"x{ending}")
    file.open({})
    file.write_columns(forms_of({"text": texts}))
    tracemalloc.start()
    for first in range(0, rows, 128):
        file.add(first, {"text": texts[first : first + 128]})
    file.complete(file.columns(), rows)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    file.close()
    assert peak < 50e6
    if ending == ".parquet":
        assert parquet.read_table(file.path)["text"].to_pylist() == texts.tolist()


def test_groups_end_with_rows_whatever_the_parts(monkeypatch):
    monkeypatch.setattr(formats, "_GROUP_BYTES", 300)
    texts = np.array(["a" * (n % 7 * 50) for n in range(40)], object)
    found = []
    for size in (1, 3, 40):
        parts = [{"text": texts[n : n + size]} for n in range(0, 40, size)]
        groups = [[len(p["text"]) for p in group] for group in formats._groups(parts)]
        found.append([sum(group) for group in groups])
    assert found[0] == found[1] == found[2]
    assert sum(found[0]) == 40
    assert len(found[0]) > 10


def test_lines_hold_no_other_ends_of_lines(tmp_path):
    part = {
        "a\u2028": np.array([["b\u2028", "c\u2029"]], object),
        "d": np.array(["\u2029"], object),
    }
    file = PartialFile(tmp_path / "x.jsonl")
    file.open({})
    file.add(0, part)
    file.complete(forms_of(part), 1)
    file.close()
    (line,) = file.path.read_text().splitlines()
    assert json.loads(line) == {"a\u2028": ["b\u2028", "c\u2029"], "d": "\u2029"}


def test_names_of_columns():
    one = np.zeros([2, 3], "f4")
    assert [*columns_of(one, {"label": one}, 0)] == ["label", "output"]
    assert [*columns_of((one, [one]), {}, 0)] == ["output_0", "output_1/0"]
    half = tf.constant([1.5, 3.25], tf.bfloat16).numpy()
    (column,) = forms_of(columns_of(half, {}, 0))
    assert (column.name, column.dtype, column.shape) == ("output", "float32", ())
    eighth = tf.cast([1.5, 3.0], tf.dtypes.experimental.float8_e5m2).numpy()
    found = columns_of(eighth, {}, 0)["output"]
    assert (found.dtype.name, found.tolist()) == ("float32", [1.5, 3.0])
    with pytest.raises(ConfigError, match="Two columns .* 'label'. Return the output under anoth"):
        columns_of({"label": one}, {"label": one}, 0)
    with pytest.raises(ConfigError, match="'output' is complex"):
        columns_of(one.astype("c8"), {}, 0)
    texts = np.array([[b"a", b"b"], [b"c", b"\xff"]], object)
    with pytest.raises(DataError, match=r"'x' must be UTF-8 text, got b'\\xff' in row 8"):
        columns_of((), {"x": texts}, 7)
    with pytest.raises(DataError, match="ends with a NUL character in row 7"):
        columns_of((), {"x": np.array([b"a\0"], object)}, 7)


def test_what_a_killed_command_leaves(tmp_path, monkeypatch):
    """At each of its writes: the next one ends with the same file, without rows computed twice."""
    expected = written(tmp_path / "whole.jsonl", 1)
    path = tmp_path / "killed.jsonl"

    class Killed(BaseException):
        pass

    calls, sync = {"left": 0}, os.fsync  # which is slow, and nothing cuts the power here

    def counted(real):
        def counting(*args, **kwargs):
            calls["left"] -= 1
            if calls["left"] == 0:
                raise Killed
            return None if real is sync else real(*args, **kwargs)

        return counting

    for name in ("replace", "fsync", "unlink", "rename", "rmdir"):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    kept = refused = 0
    for kill in range(1, 100):
        calls["left"] = kill
        try:
            resume(path, [])
            break
        except Killed:
            calls["left"] = 0
            made: list[int] = []
            if path.exists() and not path.with_name("killed.jsonl.partial").exists():
                with pytest.raises(ModelDirectoryError, match="is there already"):  # and complete
                    PartialFile(path)
                refused += 1
            else:
                kept += resume(path, made)
            assert path.read_bytes() == expected, kill
            assert [*tmp_path.glob("killed*")] == [path], kill
            path.unlink()
    assert 15 < kill < 99
    assert kept > 5
    assert refused > 3  # as the folder was removed


def resume(path, made) -> int:
    """Goes on with a file as a command does; returns the number of rows that were there."""
    file = PartialFile(path)
    try:
        file.open({"weights": "same"})
        rows = file.rows(BATCH, ROWS)
        for first, columns in batches():
            if first == 0 and not rows:
                file.write_columns(forms_of(columns))
            if first >= rows:
                made.append(first)
                file.add(first, columns)
        file.complete(file.columns(), ROWS)
        return rows
    finally:
        file.close()


def test_rows_after_a_gap_are_computed_anew(tmp_path):
    file = PartialFile(tmp_path / "x.npz")
    file.open({})
    for first, columns in batches():
        file.add(first, columns)
    (file.folder / "rows-000000000000004-000000000000008.npz").unlink()
    assert file.rows(BATCH, ROWS) == 4
    assert [path.name for path in file.folder.glob("rows-*")] == [
        "rows-000000000000000-000000000000004.npz"
    ]
    assert file.rows(3, ROWS) == 0
    file.close()


def test_a_planted_link_is_not_followed(tmp_path):
    columns = columns_of(np.zeros([4, 2], "f4"), {}, 0)
    file = PartialFile(tmp_path / "x.npz")
    file.open({})
    file.write_columns(forms_of(columns))
    file.add(0, columns)
    (tmp_path / "mine").write_text("mine")
    (file.folder / "whole").symlink_to(tmp_path / "mine")
    file.complete(file.columns(), 4)
    file.close()
    assert (tmp_path / "mine").read_text() == "mine"
    assert not file.path.is_symlink()


def test_what_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "x.jsonl"
    file = PartialFile(path)
    file.open({"checkpoint": "step 5", "config": "A = 1\nB = 2"})
    with pytest.raises(NotReady, match="another process is writing to"):
        PartialFile(path).open({})
    file.close()
    changed = {"checkpoint": "step 9", "config": "A = 1\nB = 3"}
    message = "step 5 → step 9\n  config: B = 2 → nothing\n  config: nothing → B = 3\nRepeat"
    with pytest.raises(ModelDirectoryError, match=message):
        PartialFile(path).open(changed)
    columns = columns_of(np.zeros([4, 2], "f4"), {}, 0)
    again = PartialFile(path)
    again.write_columns(forms_of(columns))
    again.add(0, columns)
    (part,) = again.folder.glob("rows-*")
    os.truncate(part, 50)
    with pytest.raises(ModelDirectoryError, match="rows-.* is damaged.* Remove it and run"):
        again.complete(again.columns(), 4)
    rows = columns["output"]
    for other in (rows[:3], rows.astype("f8"), rows[:, :1]):
        part.write_bytes(packed({"output": other}))
        with pytest.raises(ModelDirectoryError, match="damaged: expected 4 rows of output float32"):
            again.complete(again.columns(), 4)
    path.write_text("somebody else's")
    part.unlink()
    again.add(0, columns)
    with pytest.raises(ModelDirectoryError, match="is there already. Remove it"):
        again.complete(again.columns(), 4)
    assert path.read_text() == "somebody else's"
    with pytest.raises(ModelDirectoryError, match="must be a local path, got the URL gs://x"):
        PartialFile("gs://x/y.npz")
    with pytest.raises(ModelDirectoryError, match="is a folder"):
        PartialFile(tmp_path)
    (tmp_path / "y.npz").touch()
    with pytest.raises(ModelDirectoryError, match="is there already"):
        PartialFile(tmp_path / "y.npz")
    with pytest.raises(ModelDirectoryError, match="cannot be reached: File name too long"):
        PartialFile(tmp_path / f"{'x' * 300}.npz")
    with pytest.raises(ModelDirectoryError, match="cannot be written: .*Not a directory"):
        PartialFile(tmp_path / "y.npz" / "z.npz").open({})
    formats.check_columns("x.npz", forms_of({"a": np.zeros([2, 0])}))
    with pytest.raises(ConfigError, match=r"Parquet cannot hold the column a float64 \[0\]"):
        formats.check_columns("x.parquet", forms_of({"a": np.zeros([2, 0])}))
    with pytest.raises(ConfigError, match="must end with .jsonl, .npz or .parquet, got x.csv"):
        formats.check_format("x.csv")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ConfigError, match=r"pip install '.\[tables\]'. Or write .jsonl"):
        formats.check_format("x.parquet")
