import gzip
import shutil
from decimal import Decimal

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
        parquet.write_table(pyarrow.table(COLUMNS | {"income": map(Decimal, [1.5, 2, 0.25])}), path)
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


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        (CSV, {}, r"'color' \(string\) holds 'red' in row 0 of .*t\.csv .*table\.categories"),
        (CSV, {"features": {"x": "incom"}}, "no column 'incom', but age, .*Did you mean income"),
        (
            CSV,
            {"categories": {"color": ["red"]}},
            r"'blue' in row 1 of .*none of table.categories, \['red'\]",
        ),
        (
            CSV,
            {"categories": {"color": ["red", "blue", "red"]}},
            r"table.categories of 'color': .* unique, got \['red', 'blue', 'red'\]",
        ),
        ("a,b\n1,2\n,3\n", {}, r"'a' .* holds None in row 1 of .*t\.csv .*a value is missing"),
        ("a,b\n1\n", {}, "(?s)t.csv could not be read: .*Correct it"),
    ],
)
def test_bad_tables(tmp_path, text, arguments, message):
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(DataError, match=message):
        table(str(tmp_path / "t.csv"), **arguments)
