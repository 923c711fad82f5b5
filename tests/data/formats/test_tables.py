import gzip
import os
import shutil
import sys

import numpy as np
import pyarrow
import pytest
from ddl.data.formats import table
from pyarrow import parquet

from ddl.errors import DataError

COLUMNS = {
    "age": [30, 41, 25],
    "income": [1.5, 2.0, 0.25],
    "colour": ["red", "blue", "red"],
    "bought": [True, False, True],
}
CSV = "age,income,colour,bought\n30,1.5,red,true\n41,2.0,blue,false\n25,0.25,red,true\n"


@pytest.fixture(params=["csv", "tsv", "csv.gz", "parquet"])
def file(request, tmp_path):
    path = tmp_path / f"table.{request.param}"
    if request.param == "parquet":
        parquet.write_table(pyarrow.table(COLUMNS), path)
    elif request.param == "csv.gz":
        with pyarrow.output_stream(str(path), compression="gzip") as stream:
            stream.write(CSV.encode())
    else:
        path.write_text(CSV.replace(",", "\t") if request.param == "tsv" else CSV)
    return str(path)


def test_columns_become_features(file, tmp_path):
    again = shutil.copy(file, tmp_path / f"again_{os.path.basename(file)}")
    source = table(
        [file, str(again)],
        features={"x": ["age", "income", "colour"], "colour": "colour", "label": "bought"},
        categories={"colour": ["blue", "red"]},
    )
    expected = [[30, 1.5, 1], [41, 2, 0], [25, 0.25, 1]] * 2
    np.testing.assert_array_equal(source.features["x"], np.array(expected, np.float32))
    assert source.features["colour"].tolist() == [1, 0, 1] * 2
    assert source.features["label"].tolist() == [True, False, True] * 2
    dtypes = {name: str(array.dtype) for name, array in source.features.items()}
    assert dtypes == {"x": "float32", "colour": "int64", "label": "bool"}


def test_without_features_each_column_is_one(tmp_path):
    (tmp_path / "t.csv").write_text("a;b\n1;0.5\n2;1.5\n")
    source = table(str(tmp_path / "t.csv"), separator=";")
    assert source.features["a"].tolist() == [1, 2]
    assert source.features["a"].dtype == np.int64
    assert source.features["b"].dtype == np.float32


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        (
            CSV,
            {},
            r"'colour' holds string, such as 'red' in row 0 of .*t\.csv \(.*expected numbers",
        ),
        ("y\n1\n2\nn/ a\n4\n", {}, r"'y' holds string, such as 'n/ a' in row 2 of .*t\.csv \(co"),
        (CSV, {"features": {"x": "incom"}}, r"no column 'incom'; .*Did you mean income"),
        (CSV, {"categories": {"color": ["red"]}}, "no column 'color'"),
        (
            CSV,
            {"categories": {"colour": ["red"]}},
            r"'blue' in row 1 of .*t\.csv \(.*, which is not among.* Add",
        ),
        (CSV, {"categories": {"colour": ["red", "blue", "red"]}}, "'colour' once, got 'red' sever"),
        ("a,b\n1,2\n,3\n", {}, r"'a' lacks 1 values, the first in row 1 of .*t\.csv \("),
        ("a,a\n1,2\n", {}, "t.csv must have different names, got 'a' several times. Rename"),
        ("a,b\n1\n", {}, "(?s)t.csv could not be read: .* correct the file, table.files or"),
        ("", {}, "t.csv could not be read"),
        ("a\nnan\n", {}, "'a' lacks 1 values"),
        ("a\n1\ninf\n", {}, r"'a' holds inf in row 1 of .*t\.csv \(.* finite number of float32"),
        ("a\n1e39\n", {}, r"'a' holds 1e\+39 in row 0 of .*t\.csv"),
    ],
)
def test_bad_tables(tmp_path, text, arguments, message):
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(DataError, match=message):
        table(str(tmp_path / "t.csv"), **arguments)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ("a,b\n1,x\n,x\n", r"'a' lacks 1 values, the first in row 1 of .*2\.csv \(counted from 0"),
        ("a,b\n1,x\ninf,x\n", r"'a' holds inf in row 1 of .*2\.csv"),
        ("a,b\n1,x\n2,z\n", r"'b' holds 'z' in row 1 of .*2\.csv .*not among"),
        (
            "a,b\n1,x\n?,x\n",
            r"'a' must have one type .* holds int64 in .*1\.csv and text such as '\?' in row 1 of "
            r".*2\.csv \(counted from 0\)\. Correct the value",
        ),
        ("a,b\n1,x\n2\n", r"(?s)2\.csv could not be read: .*Expected 2 columns, got 1"),
    ],
    ids=["missing", "infinite", "category", "text", "columns"],
)
def test_the_file_and_the_row_in_it_are_named(tmp_path, second, message):
    for name, text in (("1", "a,b\n1,x\n2,y\n3,x\n"), ("2", second), ("3", "a,b\n1,x\n")):
        (tmp_path / f"{name}.csv").write_text(text)
    with pytest.raises(DataError, match=message):
        table(
            [str(tmp_path / f"{name}.csv") for name in "123"],
            categories={"b": ["x", "y"]},
        )


def test_files_may_be_compressed_each_in_its_way(tmp_path):
    (tmp_path / "1.csv").write_text("a\n1\n")
    (tmp_path / "2.csv.gz").write_bytes(gzip.compress(b"a\n2\n"))
    for number, codec in ((3, "gzip"), (4, "snappy")):
        column = pyarrow.table({"a": [number]})
        parquet.write_table(column, tmp_path / f"{number}.parquet", compression=codec)
    source = table([str(file) for file in sorted(tmp_path.iterdir())])
    assert source.features["a"].tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("plain.csv.gz", b"a\n1\n"),
        ("cut.csv.gz", gzip.compress(b"a\n" + b"1\n" * 999, mtime=0)[:-12]),
        ("named.csv", gzip.compress(b"a\n1\n", mtime=0)),
        ("latin.csv", b"caf\xe9\n1\n"),
    ],
    ids=["not compressed", "cut off", "not named", "not UTF-8"],
)
def test_tables_of_another_compression_are_named(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=f"{name} could not be read"):
        table(str(tmp_path / name))


@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_a_damaged_parquet_file_is_named(tmp_path, damage):
    file = tmp_path / "t.parquet"
    values = {"a": np.random.default_rng(0).integers(0, 1 << 40, 999)}
    parquet.write_table(
        pyarrow.table(values),
        file,
        write_page_checksum=True,
        use_dictionary=False,
        compression="none",
    )
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content if damage == "flipped" else content[: len(content) // 2])
    with pytest.raises(DataError, match=r"t\.parquet could not be read"):
        table(str(file))


def test_bad_files(tmp_path, monkeypatch):
    (tmp_path / "a.csv").write_text("a\n1\n")
    (tmp_path / "b.csv").write_text("b\n1\n")
    (tmp_path / "cut.parquet").write_bytes(b"PAR1 cut")
    names = [str(tmp_path / name) for name in ("a.csv", "b.csv", "cut.parquet", "absent.csv")]
    with pytest.raises(DataError, match=r"the same columns. .*a\.csv has a; .*b\.csv has b\."):
        table(names[:2])
    with pytest.raises(DataError, match="cut.parquet could not be read"):
        table(names[2])
    with pytest.raises(DataError, match="absent.csv' was not found"):
        table(names[3])
    with pytest.raises(DataError, match="files is empty"):
        table([])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"pip install '\.\[tables\]'"):
        table(names[0])


def test_integers_beyond_int64_are_named(tmp_path):
    """They became negative."""
    for number, values in enumerate(([1, 2], [3, 2**63 + 5])):
        columns = {"a": pyarrow.array(values, pyarrow.uint64())}
        parquet.write_table(pyarrow.table(columns), tmp_path / f"{number}.parquet")
    files = [str(tmp_path / f"{number}.parquet") for number in range(2)]
    message = r"'a' in row 1 of .*1\.parquet \(.* at most 9223372036854775807, .* got 9223372036854"
    for features in (None, {"x": ["a"]}):
        with pytest.raises(DataError, match=message):
            table(files, features=features)
    assert table(files[:1]).features["a"].dtype == np.int64


@pytest.mark.parametrize(
    ("texts", "row"),
    [
        # Read as float64, since one is beyond int64.
        (["a\n1\n", "a\n1\n12345678901234567890\n12345678901234567891\n"], r"row 1 of .*1\.csv"),
        (["a\n1\n18446744073709551615\n"], r"row 1 of .*0\.csv"),  # becomes a power of 2
        (["a\n16777217\n16777216\n", "a\n0.5\n"], r"row 0 of .*0\.csv"),
        (["a\n0.5\n", "a\n7\n16777217\n"], r"row 1 of .*1\.csv"),
    ],
)
def test_whole_numbers_that_float32_would_change_are_named(tmp_path, texts, row):
    """Different ids became one."""
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.csv").write_text(text)
    files = [str(tmp_path / f"{number}.csv") for number in range(len(texts))]
    message = rf"(?s)'a' must hold whole .*{row} \(.* would become .* number them anew .* \['a'\]"
    with pytest.raises(DataError, match=message):
        table(files)
    assert table(files, features={"x": ["a"]}).features["x"].dtype == np.float32


@pytest.mark.parametrize("text", ["a\n16777217\n0.5\n", "a\n20000001.0\n2e3\n", "a\n6.02e23\n.1\n"])
def test_measurements_may_be_rounded(tmp_path, text):
    (tmp_path / "t.csv").write_text(text)
    assert table(str(tmp_path / "t.csv")).features["a"].dtype == np.float32


def test_a_table_that_is_listed_twice(tmp_path):
    (tmp_path / "a.csv").write_text("a\n1\n")
    (tmp_path / "b.csv").symlink_to("a.csv")
    for other in ("a.csv", "b.csv"):
        with pytest.raises(DataError, match=r"table\.files must list each file once, got .*a\.csv"):
            table([str(tmp_path / "a.csv"), str(tmp_path / other)])


def of_lists(tmp_path, *columns):
    """Writes a Parquet file with a column `x` for each list of rows, and returns the paths."""
    paths = [str(tmp_path / f"{number}.parquet") for number in range(len(columns))]
    for path, column in zip(paths, columns, strict=True):
        parquet.write_table(
            pyarrow.table({"x": column, "y": pyarrow.array(range(len(column)))}), path
        )
    return paths


def test_lists_of_one_length_become_features(tmp_path):
    numbers = np.arange(12).reshape(2, 2, 3)
    cells = pyarrow.array((numbers / 2).tolist())
    fixed = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(np.arange(6)), 3)
    words = pyarrow.array([["b", "a"], ["a", "a"]])
    arrays = {
        name: table(
            *of_lists(tmp_path, column), features={"x": "x"}, categories=categories
        ).features
        for name, column, categories in [
            ("cells", cells, None),
            ("fixed", fixed, None),
            ("sliced", pyarrow.concat_arrays([fixed, fixed]).slice(1, 2), None),
            ("words", words, {"x": ["a", "b"]}),
        ]
    }
    np.testing.assert_array_equal(arrays["cells"]["x"], (numbers / 2).astype(np.float32))
    np.testing.assert_array_equal(arrays["fixed"]["x"], np.arange(6).reshape(2, 3))
    np.testing.assert_array_equal(arrays["sliced"]["x"], [[3, 4, 5], [0, 1, 2]])
    np.testing.assert_array_equal(arrays["words"]["x"], [[1, 0], [0, 0]])
    assert {name: str(each["x"].dtype) for name, each in arrays.items()} == {
        "cells": "float32",
        "fixed": "int64",
        "sliced": "int64",
        "words": "int64",
    }


@pytest.mark.parametrize(
    ("large", "second", "message"),
    [
        (
            2,
            [[1, 2], [3]],
            r"a list of 2 in row 0 of .*0\.parquet.* and one of 1 in row 1 of .*1\.parquet",
        ),
        (2, [[1, 2], None], r"lacks 1 values, the first in row 1 of .*1\.parquet"),
        (2, [[1, 2], [3, None]], r"lacks 1 values, the first in row 1 of .*1\.parquet"),
        (2, [[0.5, 2.0], [3.0, np.inf]], r"holds inf in row 1 of .*1\.parquet"),
        (
            16777217,
            [[1.0, 2.0], [0.5, 0.5]],
            r"got 16777217 in row 2 of .*0\.parquet.*lists as float32",
        ),
    ],
)
def test_lists_that_are_no_feature(tmp_path, large, second, message):
    first = pyarrow.array([[1, 2], [3, 4], [5, large]])
    paths = of_lists(tmp_path, first, pyarrow.array(second))
    with pytest.raises(DataError, match=message):
        table(paths, features={"x": "x"})


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[], []], r"got a list of 0 in row 0 of \S+ \(counted from 0\)\. Pad"),
        ([[[1, 2], [3]]], r"got a list of 2 in row 0 of .* and one of 1 in row 0 of"),
    ],
)
def test_empty_lists_and_lists_of_lists(tmp_path, rows, message):
    with pytest.raises(DataError, match=message):
        table(of_lists(tmp_path, pyarrow.array(rows)), features={"x": "x"})


def test_lists_in_a_group_of_columns(tmp_path):
    with pytest.raises(DataError, match="'x' holds lists of 2. Make it a feature of its own"):
        table(of_lists(tmp_path, pyarrow.array([[1, 2]])), features={"x": ["y", "x"]})
