"""Tables in CSV and Parquet files, read with Apache Arrow (the extra `tables`)."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ddl.data.arrays import ArraySource
from ddl.data.formats.columns import (
    Rows,
    array_of,
    check_single,
    check_whole,
    first_text,
    flat_column,
    type_of_values,
)
from ddl.data.storage.file_sets import check_files, paths_of
from ddl.errors import DataError, did_you_mean, installing


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
      categories as int64. A column of lists of one length becomes [n, length].

    Raises:
      DataError: If pyarrow is not installed, a file is missing or damaged, a file is listed twice,
        a column is missing, a value is missing or infinite, or a column holds text without
        `categories` or a value that they lack; if lists of a column differ in length; if an integer
        is beyond int64; or if a column that is no group would be float32, and whole numbers in a
        file of it would change.
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
    flat = {name: flat_column(name, columns.column(name), rows) for name in {*used}}
    alone = {group for group in chosen.values() if isinstance(group, str)}
    for name in {*used} - alone:
        check_single(name, flat[name])
    for name in alone - {*(categories or {})}:
        check_whole(name, flat[name].values, flat[name].rows)
    arrays = {
        name: array_of(name, column.values, (categories or {}).get(name), column.rows).reshape(
            column.shape
        )
        for name, column in flat.items()
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


def _columns(files: Sequence[str], separator: str) -> tuple[Any, Rows]:
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
            found = csv.read_csv(file, parse_options=csv.ParseOptions(delimiter=delimiter))
            _ = found.column_names  # raises for names that are not UTF-8
            return found
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
    rows = Rows(
        files,
        np.cumsum([len(each) for each in tables]).tolist(),
        [{field.name: type_of_values(field.type) for field in each.schema} for each in tables],
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
            row = first_text(values)
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
