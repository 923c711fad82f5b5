import sys

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from ddl.data.formats import table
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


def test_columns_become_features(file):
    source = table(
        [file, file],
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
        (CSV, {}, r"'colour' holds string, such as 'blue', 'red', expected numbers"),
        (CSV, {"features": {"x": "incom"}}, r"no column 'incom'; .*Did you mean income"),
        (CSV, {"categories": {"color": ["red"]}}, "no column 'color'"),
        (CSV, {"categories": {"colour": ["red"]}}, "'blue' in row 1 .*, which is not among.* Add"),
        (CSV, {"categories": {"colour": ["red", "blue", "red"]}}, "'colour' once, got 'red' sever"),
        ("a,b\n1,2\n,3\n", {}, "'a' lacks 1 values, the first in row 1"),
        ("a,a\n1,2\n", {}, "t.csv must have different names, got 'a' several times. Rename"),
        ("a,b\n1\n", {}, "(?s)t.csv could not be read: .* correct the file, table.files or"),
        ("", {}, "t.csv could not be read"),
        ("a\nnan\n", {}, "'a' lacks 1 values"),
        ("a\ninf\n", {}, "infinite values"),
    ],
)
def test_bad_tables(tmp_path, text, arguments, message):
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(DataError, match=message):
        table(str(tmp_path / "t.csv"), **arguments)


def test_bad_files(tmp_path, monkeypatch):
    (tmp_path / "a.csv").write_text("a\n1\n")
    (tmp_path / "b.csv").write_text("b\n1\n")
    (tmp_path / "cut.parquet").write_bytes(b"PAR1 cut")
    names = [str(tmp_path / name) for name in ("a.csv", "b.csv", "cut.parquet", "absent.csv")]
    with pytest.raises(DataError, match="must have the same columns"):
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
