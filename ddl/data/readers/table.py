"""Tables in CSV and Parquet files, read with pyarrow and pandas (the extra `tables`)."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ddl.data.readers.paths import Paths, found_files
from ddl.data.source import Source, first_line
from ddl.errors import DataError, did_you_mean, installing


def table(
    files: Paths,
    features: Mapping[str, str | Sequence[str]] | None = None,
    *,
    categories: Mapping[str, Sequence[Any]] | None = None,
) -> Source:
    """Reads the columns of CSV or Parquet files into arrays in memory.

    For example, as `ddl.models.table_mlp` takes them:

        ddl.data.table(
            "train.csv",
            {"numbers": ["age", "income"], "color": "color", "label": "bought"},
            categories={"color": ["blue", "red"]}
        )

    Args:
      files: Path of a file, or a list of paths with the same columns, ending with `.csv` or
        `.csv.gz` (commas between columns), `.tsv` (tabs), `.parquet` or `.pq`.
      features: Columns by the name of the feature: the name of one column gives [n], a list of
        names gives float32 [n, columns]. None makes each column a feature.
      categories: For columns of text, or of numbers that stand for categories: their values, in
        the order of the numbers 0, 1, … that replace them, each once. Give training and evaluation
        data the same.

    Returns:
      Columns of integers as int64, of booleans as bool, of other numbers as float32, and of
      categories as int64; `source.arrays` holds them.

    Raises:
      DataError: If pandas or pyarrow is not installed; a file is missing, damaged or listed twice;
        files differ in their columns; a column is missing; a value is missing, infinite, beyond
        int64, or text that is no number and not in `categories`; or float32 would change whole
        numbers, such as ids, of a column that is in no list.
    """
    paths = found_files(files, "table.files")
    tables = [_read(path) for path in paths]
    columns, categories = tables[0].column_names, categories or {}
    for path, each in zip(paths, tables, strict=True):
        if each.column_names != columns:
            raise DataError(
                f"All tables must have the same columns. {paths[0]} has {', '.join(columns)}; "
                f"{path} has {', '.join(each.column_names)}. Read other columns on their own."
            )
    groups = features or {name: name for name in columns}
    listed = [[group] if isinstance(group, str) else group for group in groups.values()]
    for name in [*itertools.chain(*listed), *categories]:
        if name not in columns:
            found = f"{paths[0]} has no column {name!r}, but {', '.join(columns)}."
            raise DataError(f"{found}{did_you_mean(name, columns)}")
    arrays = {}
    for (feature, group), names in zip(groups.items(), listed, strict=True):
        alone = isinstance(group, str)
        read = [_column(name, tables, paths, categories.get(name), alone) for name in names]
        arrays[feature] = read[0] if alone else np.stack(read, axis=1)
    return Source(arrays, files=paths)


def _read(file: str) -> Any:
    """Returns Arrow's table of a file."""
    try:
        import pandas  # noqa: F401
        import pyarrow
        from pyarrow import csv, parquet
    except ImportError as error:
        raise DataError(f"Tables need pandas, pyarrow: {error}. {installing('tables')}") from error
    try:
        if file.endswith((".parquet", ".pq")):
            found = parquet.read_table(file, page_checksum_verification=True)
        else:
            options = csv.ParseOptions(delimiter="\t" if file.endswith(".tsv") else ",")
            found = csv.read_csv(file, parse_options=options)
        names = found.column_names  # raises for names that are not UTF-8
        if not len(found) or len(set(names)) < len(names):
            raise ValueError("it has no rows, or several columns of one name")
        return found
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise DataError(f"{file} could not be read: {first_line(error)}. Correct it.") from error


def _column(
    name: str, tables: Sequence[Any], files: Sequence[str], values: Any, alone: bool
) -> np.ndarray:
    """Returns a column of all files; as float32 if it is part of a list of columns."""
    parts = [_part(name, t.column(name), f, values) for t, f in zip(tables, files, strict=True)]
    if not alone or any(part.dtype.kind == "f" for part in parts):
        parts = [_as_float32(name, p, f, alone) for p, f in zip(parts, files, strict=True)]
    return np.concatenate(parts)


def _part(name: str, column: Any, file: str, values: Sequence[Any] | None) -> np.ndarray:
    """Returns the column of one file: int64, bool or float [rows]."""
    import pandas

    found = column.to_pandas().to_numpy()
    if column.null_count:
        bad, reason = column.is_null().to_numpy(), "a value is missing. Fill it in"
    elif values is not None:
        try:
            array = np.asarray(pandas.Categorical(found, categories=list(values)).codes, np.int64)
        except ValueError as error:
            text = f"table.categories of {name!r}: {error}, got {list(values)!r:.200}. Correct it."
            raise DataError(text) from error
        bad, reason = array < 0, f"it is none of table.categories, {list(values)!r:.200}"
    elif found.dtype.kind not in "biuf":  # decimals are objects, as texts are
        array = pandas.to_numeric([str(value) for value in found], errors="coerce")
        bad = np.isnan(array) | (array.dtype == np.uint64)  # too large for int64
        reason = "numbers are expected, or the column's values in table.categories"
    else:
        array = found if found.dtype.kind in "bf" else found.astype(np.int64)
        bad = (array < 0) & (found.dtype == np.uint64)
        reason = "int64 cannot hold it. Number ids anew from 0 on"
    if bad.any():
        row = int(np.argmax(bad))
        raise _refused(f"{name!r} ({column.type})", column[row].as_py(), row, file, reason)
    return array


def _as_float32(name: str, values: np.ndarray, file: str, alone: bool) -> np.ndarray:
    """Rounds numbers that are finite and, if alone, are no ids that would change."""
    with np.errstate(over="ignore"):
        rounded = values.astype(np.float32)
    if (bad := ~np.isfinite(rounded)).any():
        row, reason = int(np.argmax(bad)), "a finite number of float32 is expected"
        raise _refused(repr(name), values[row], row, file, reason)
    changed = rounded != values
    if alone and changed.any() and (values % 1 == 0).all():
        row = int(np.argmax(changed))
        reason = (
            f"float32 would make {rounded[row]:.0f} of it. Number ids anew from 0 on, in integers "
            f"in all files; or list a column of measurements in table.features, as [{name!r}]"
        )
        raise _refused(repr(name), values[row], row, file, reason)
    return rounded


def _refused(column: str, value: Any, row: int, file: str, reason: str) -> DataError:
    return DataError(
        f"Column {column} holds {value!r:.60} in row {row:,} of {file} (counted from 0): {reason}."
    )
