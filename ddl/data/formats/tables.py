"""Tables in CSV and Parquet files, read with Apache Arrow (the extra `tables`)."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ddl.data.arrays import ArraySource
from ddl.data.formats.integers import check_int64
from ddl.data.storage.file_sets import check_files, paths_of
from ddl.errors import DataError, did_you_mean, installing

_EXACT = 2.0**53
"""From here on, different integers have the same number of float64."""


def table(
    files: str | Sequence[str],
    *,
    features: Mapping[str, str | Sequence[str]] | None = None,
    categories: Mapping[str, Sequence[Any]] | None = None,
    separator: str = ",",
) -> ArraySource:
    """Reads the columns of CSV or Parquet files into arrays in memory.

    Args:
      files: Path of a file, or a list of paths with the same columns, ending with `.csv`, `.tsv`,
        `.csv.gz`, `.parquet` or `.pq`.
      features: Columns by the name of the feature: the name of one column gives [n], a list of
        numeric columns gives float32 [n, columns]. For example
        {"x": ["age", "income"], "label": "bought"}. None makes each column a feature.
      categories: For columns of text or of numbers that stand for categories: their values, in the
        order of the numbers 0, 1, … that replace them. Training and evaluation data must be given
        the same.
      separator: Text between the columns of CSV files.

    Returns:
      Columns of integers as int64, of booleans as bool, of other numbers as float32, and of
      categories as int64.

    Raises:
      DataError: If pyarrow is not installed, a file is missing or damaged, a file is listed twice,
        a column is missing, a value is missing or infinite, or a column holds text without
        `categories` or a value that they lack; if an integer is beyond int64; or if a column that
        is no group would be float32, and whole numbers in a file of it would change.
    """
    paths = paths_of(files)
    if not paths:
        raise DataError("table.files is empty. Pass at least one path.")
    check_files(paths, "table.files")
    columns, rows = _columns(paths, separator)
    chosen = features or {name: name for name in columns.column_names}
    used = [name for group in chosen.values() for name in _as_list(group)]
    named = [*used, *(categories or {})]
    if absent := [name for name in named if name not in columns.column_names]:
        raise DataError(
            f"{paths[0]} has no column {absent[0]!r}; it has {', '.join(columns.column_names)}."
            f"{did_you_mean(absent[0], columns.column_names)}"
        )
    alone = {group for group in chosen.values() if isinstance(group, str)}
    for name in alone - {*(categories or {})}:
        _check_whole(name, columns.column(name), rows)
    arrays = {
        name: _array(name, columns.column(name), (categories or {}).get(name), rows)
        for name in {*used}
    }
    return ArraySource(
        {
            feature: arrays[group]
            if isinstance(group, str)
            else np.stack(
                [arrays[name] for name in group], axis=1, dtype=np.float32, casting="unsafe"
            )
            for feature, group in chosen.items()
        }
    )


def _as_list(group: str | Sequence[str]) -> list[str]:
    return [group] if isinstance(group, str) else list(group)


class _Rows(NamedTuple):
    """The rows of all files, one after the other.

    Attributes:
      files: Paths of the files.
      ends: Number of rows of each file and all before it.
      types: For each file, Arrow's types of its columns by name.
    """

    files: Sequence[str]
    ends: Sequence[int]
    types: Sequence[Mapping[str, str]]

    def place(self, row: int) -> str:
        """Returns what messages call a row, such as "row 3 of a.csv (counted from 0)"."""
        number = int(np.searchsorted(self.ends, row, side="right"))
        first = self.ends[number - 1] if number else 0
        return f"row {row - first:,} of {self.files[number]} (counted from 0)"


def _columns(files: Sequence[str], separator: str) -> tuple[Any, _Rows]:
    """Returns the table of all files."""
    try:
        import pyarrow
        from pyarrow import csv, parquet
    except ImportError as error:
        raise DataError(
            f"Reading tables needs pyarrow, which is not installed. {installing('tables')}"
        ) from error

    def read(file: str) -> Any:
        if not os.path.isfile(file):
            raise DataError(f"The table {file!r} was not found. Correct table.files.")
        try:
            if file.endswith((".parquet", ".pq")):
                return parquet.read_table(file, page_checksum_verification=True)
            delimiter = "\t" if file.endswith(".tsv") else separator
            return csv.read_csv(file, parse_options=csv.ParseOptions(delimiter=delimiter))
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            raise DataError(
                f"The table {file} could not be read: {error}. It must be a file .csv, .tsv or "
                ".parquet of that format; correct the file, table.files or table.separator."
            ) from error

    tables = [read(file) for file in files]
    for file, each in zip(files, tables, strict=True):
        if each.column_names != tables[0].column_names:
            raise DataError(
                "All tables must have the same columns. "
                f"{files[0]} has {', '.join(tables[0].column_names)}; {file} has "
                f"{', '.join(each.column_names)}. Read tables of other columns on their own."
            )
        doubled = {n for n in each.column_names if each.column_names.count(n) > 1}
        if doubled:
            raise DataError(
                f"The columns of {file} must have different names, got {min(doubled)!r} several "
                "times. Rename them in the file."
            )
    rows = _Rows(
        files,
        np.cumsum([len(each) for each in tables]).tolist(),
        [{field.name: str(field.type) for field in each.schema} for each in tables],
    )
    try:
        return pyarrow.concat_tables(tables, promote_options="permissive"), rows
    except pyarrow.ArrowException as error:
        raise DataError(_of_two_types(files, tables, str(error))) from error


def _of_two_types(files: Sequence[str], tables: Sequence[Any], reason: str) -> str:
    """Returns the message for tables that cannot be joined."""
    for name in tables[0].column_names:
        types = [str(each.schema.field(name).type) for each in tables]
        texts = [kind in ("string", "large_string") for kind in types]
        if any(texts) and not all(texts):
            of_text, other = texts.index(True), texts.index(False)
            values = tables[of_text].column(name).to_numpy()
            row = _first_text(values)
            return (
                f"Column {name!r} must have one type in all tables, but holds {types[other]} in "
                f"{files[other]} and text such as {str(values[row])!r} in row {row:,} of "
                f"{files[of_text]} (counted from 0). Correct the value, or write the column as "
                "text in all tables and name its values in table.categories."
            )
    return (
        f"A column must have one type in all {len(files):,} tables ({files[0]}, …), but types "
        f"do not fit together: {reason}. Convert the column in one of the files."
    )


def _first_text(values: np.ndarray) -> int:
    """Returns the first row whose value is no number, or 0."""
    for row, value in enumerate(values):
        try:
            float(value)
        except (TypeError, ValueError):
            return row
    return 0


def _array(name: str, column: Any, categories: Sequence[Any] | None, rows: _Rows) -> np.ndarray:
    if column.null_count:
        import pyarrow.compute

        row = pyarrow.compute.index(column.is_null(), True).as_py()
        raise DataError(
            f"Column {name!r} lacks {column.null_count:,} values, the first in {rows.place(row)}. "
            "Fill them in, or remove the rows."
        )
    values = column.to_numpy()
    if categories is not None:
        return _numbered(name, values, list(categories), rows)
    if values.dtype.kind == "b":
        return values
    if values.dtype.kind in "iu":
        check_int64(values, lambda row: f"Column {name!r} in {rows.place(row)}")
        return values.astype(np.int64, copy=False)
    if values.dtype.kind == "f":
        with np.errstate(over="ignore"):
            numbers = values.astype(np.float32, copy=False)
        if not np.isfinite(numbers).all():
            row = int(np.argmin(np.isfinite(numbers)))
            raise DataError(
                f"Column {name!r} holds {values[row]} in {rows.place(row)}, expected a finite "
                "number of float32. Correct it, or remove the row."
            )
        return numbers
    row = _first_text(values)
    raise DataError(
        f"Column {name!r} holds {column.type}, such as {str(values[row])!r} in {rows.place(row)}, "
        "expected numbers. Correct the value, name the column's values in table.categories, or "
        "leave it out of table.features."
    )


def _check_whole(name: str, column: Any, rows: _Rows) -> None:
    """Raises DataError if whole numbers of a file would change in a column of float32.

    Such are ids above the range of int64 in a CSV file, which Arrow reads as numbers of float64,
    and a column that holds integers in one file and other numbers in another.
    """
    if str(column.type) != "double" or column.null_count:
        return
    values = column.to_numpy()
    begins = [0, *rows.ends[:-1]]
    for begin, end, types in zip(begins, rows.ends, rows.types, strict=True):
        of_file = values[begin:end]
        is_double = types[name] == "double"
        if (
            not (is_double or "int" in types[name])
            or not np.isfinite(of_file).all()
            or (of_file % 1).any()
        ):
            continue
        with np.errstate(over="ignore"):
            rounded = of_file.astype(np.float32)
        # Numbers with a point are measurements, unless float64 does not hold their digits either.
        beyond = np.abs(of_file) >= _EXACT
        changed = beyond if is_double else (rounded != of_file) | beyond
        changed &= np.isfinite(rounded)  # `_array` refuses infinity
        if changed.any():
            row = int(np.argmax(changed))
            raise DataError(
                f"Column {name!r} must hold whole numbers that float32 can hold, since it becomes "
                f"float32, got {of_file[row]:.0f} in {rows.place(begin + row)}, which would "
                f"become {rounded[row]:.0f}. If such numbers are ids, number them anew from 0 on, "
                "in integers in all files; or write them as text, such as 'id7', and name the "
                "values in table.categories. If they are measurements, list the column in a group "
                f"in table.features, such as [{name!r}], which is rounded to float32."
            )


def _numbered(name: str, values: np.ndarray, categories: list[Any], rows: _Rows) -> np.ndarray:
    numbers = {value: number for number, value in enumerate(categories)}
    if len(numbers) < len(categories):
        doubled = next(value for value in categories if categories.count(value) > 1)
        raise DataError(
            f"table.categories must name each value of column {name!r} once, got {doubled!r} "
            "several times. Remove all but one."
        )
    unique, inverse = np.unique(values, return_inverse=True)
    found = unique.tolist()
    if unknown := [place for place, value in enumerate(found) if value not in numbers]:
        row = int(np.argmax(inverse == unknown[0]))
        raise DataError(
            f"Column {name!r} holds {found[unknown[0]]!r} in {rows.place(row)}, which is not among "
            f"its values in table.categories: {', '.join(map(repr, categories))}. Add the value to "
            "table.categories, or correct the table."
        )
    return np.array([numbers[value] for value in found], np.int64)[inverse]
