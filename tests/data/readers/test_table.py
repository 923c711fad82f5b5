import gzip
import shutil
import sys

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from ddl.data.readers.table import table
from ddl.errors import DataError

COLUMNS = {
    "age": [30, 41, 25],
    "income": [1.5, 2.0, 0.25],
    "color": ["red", "blue", "red"],
    "bought": [True, False, True],
}
CSV = "age,income,color,bought\n30,1.5,red,true\n41,2.0,blue,false\n25,0.25,red,true\n"


@pytest.fixture(params=["csv", "tsv", "csv.gz", "parquet"])
def file(request, tmp_path):
    path = tmp_path / f"table.{request.param}"
    if request.param == "parquet":
        parquet.write_table(pyarrow.table(COLUMNS), path)
    elif request.param == "csv.gz":
        path.write_bytes(gzip.compress(CSV.encode()))
    else:
        path.write_text(CSV.replace(",", "\t") if request.param == "tsv" else CSV)
    return str(path)


def test_columns_become_features(file, tmp_path):
    again = shutil.copy(file, tmp_path / f"again_{file.rsplit('/')[-1]}")
    source = table(
        [file, again],
        {"x": ["age", "income", "color"], "color": "color", "label": "bought"},
        categories={"color": ["red", "blue"]},  # not as they are sorted
    )
    expected = [[30, 1.5, 0], [41, 2, 1], [25, 0.25, 0]] * 2
    np.testing.assert_array_equal(source.arrays["x"], np.array(expected, np.float32))
    assert source.arrays["color"].tolist() == [0, 1, 0] * 2
    assert source.arrays["label"].tolist() == [True, False, True] * 2
    assert [each.dtype for each in source.arrays.values()] == [np.float32, np.int64, bool]
    assert source.files == (file, str(again))


def test_without_features_each_column_is_one(tmp_path):
    (tmp_path / "t.csv").write_text("a;b\n1;0.5\n2;1.5\n")
    arrays = table(str(tmp_path / "t.csv"), separator=";").arrays
    assert arrays["a"].tolist() == [1, 2]
    assert (arrays["a"].dtype, arrays["b"].dtype) == (np.int64, np.float32)


def test_categories_may_be_numbers_or_those_of_pandas(tmp_path):
    texts = pyarrow.array(["red", "blue"]).dictionary_encode()
    parquet.write_table(pyarrow.table({"n": [30, 10], "t": texts}), tmp_path / "t.parquet")
    known = {"n": [10, 30], "t": ["blue", "red"]}
    arrays = table(tmp_path / "t.parquet", categories=known).arrays
    assert {name: each.tolist() for name, each in arrays.items()} == {"n": [1, 0], "t": [1, 0]}


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        (CSV, {}, r"'color' \(string\) holds 'red' in row 0 of .*t\.csv .*table\.categories"),
        ("y\n1\n2\nn/ a\n4\n", {}, r"'y' \(string\) holds 'n/ a' in row 2 of .*t\.csv \("),
        (CSV, {"features": {"x": "incom"}}, "no column 'incom'. .*Did you mean income"),
        (CSV, {"categories": {"colour": ["red"]}}, "no column 'colour'. .*Did you mean color"),
        (
            CSV,
            {"categories": {"color": ["red"]}},
            r"'blue' in row 1 of .*none of table.categories, \['red'\]",
        ),
        ("a,b\n1,2\n,3\n", {}, r"'a' .* holds None in row 1 of .*t\.csv .*a value is missing"),
        ("a,a\n1,2\n", {}, "t.csv could not be read: .*several columns of one name"),
        ("a,b\n1\n", {}, "(?s)t.csv could not be read: .* table.separator"),
        ("a\n1\ninf\n", {}, r"'a' holds .*inf.* in row 1 of .*t\.csv.* finite number of float32"),
    ],
)
def test_bad_tables(tmp_path, text, arguments, message):
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(DataError, match=message):
        table(str(tmp_path / "t.csv"), **arguments)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ("a,b\n1,x\n,x\n", r"row 1 of .*2\.csv .*missing"),
        ("a,b\n1,x\n?,x\n", r"'a' .* holds '\?' in row 1 of .*2\.csv"),
        ("a,b\n1,x\n2\n", r"(?s)2\.csv could not be read: .*Expected 2 columns, got 1"),
        ("a,c\n1,x\n", r"the same columns. .*1\.csv has a, b; .*2\.csv has a, c\."),
    ],
)
def test_the_file_and_the_row_in_it_are_named(tmp_path, second, message):
    for name, text in (("1", "a,b\n1,x\n2,y\n3,x\n"), ("2", second), ("3", "a,b\n1,x\n")):
        (tmp_path / f"{name}.csv").write_text(text)
    with pytest.raises(DataError, match=message):
        table([tmp_path / f"{name}.csv" for name in "123"], categories={"b": ["x", "y"]})


@pytest.mark.parametrize("missing", ["pandas", "pyarrow"])
def test_without_a_package_the_extra_is_named(file, monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(DataError, match=rf"{missing}.*pip install '\.\[tables\]'"):
        table(file)


def test_integers_beyond_int64_do_not_become_negative(tmp_path):
    values = pyarrow.array([3, 2**63 + 5], pyarrow.uint64())
    parquet.write_table(pyarrow.table({"a": values}), tmp_path / "t.parquet")
    with pytest.raises(DataError, match=r"9223372036854775813 in row 1 of .*int64 cannot"):
        table(tmp_path / "t.parquet")


@pytest.mark.parametrize("first", ["a\n1\n12345678901234567890\n", "a\n1\n16777217\n"])
def test_ids_that_float32_would_change_are_named(tmp_path, first):
    (tmp_path / "0.csv").write_text(first)
    (tmp_path / "1.csv").write_text("a\n0.5\n")
    files = sorted(tmp_path.iterdir())
    with pytest.raises(DataError, match=r"'a' holds .* row 1 of .*0\.csv.*float32 would .*\['a'\]"):
        table(files)
    assert table(files, {"x": ["a"]}).arrays["x"].dtype == np.float32


def test_measurements_are_rounded(tmp_path):
    (tmp_path / "t.csv").write_text("a\n16777217\n0.1\n")
    assert table(tmp_path / "t.csv").arrays["a"].tolist() == [16777216, np.float32(0.1)]
