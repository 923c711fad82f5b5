"""Columns of a table as arrays: their rows, lists, dtypes and categories."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ddl.data.formats.integers import check_int64
from ddl.errors import DataError

_EXACT = 2.0**53
"""From here on, different integers have the same number of float64."""


class Rows(NamedTuple):
    """The rows of all files, one after the other.

    Attributes:
      files: Paths of the files.
      ends: Number of rows of each file and all before it.
      types: For each file, Arrow's types of its columns by name; of lists, that of their values.
      values: Number of values in a row of the column that is read; 1 without lists.
    """

    files: Sequence[str]
    ends: Sequence[int]
    types: Sequence[Mapping[str, str]]
    values: int = 1

    def place(self, value: int) -> str:
        """Returns the name of the row of a value, such as "row 3 of a.csv (counted from 0)"."""
        row = value // self.values
        number = int(np.searchsorted(self.ends, row, side="right"))
        first = self.ends[number - 1] if number else 0
        return f"row {row - first:,} of {self.files[number]} (counted from 0)"


class Column(NamedTuple):
    """The values of a column, those of its lists one after the other.

    Attributes:
      values: Arrow's column of the values.
      shape: Shape of the feature: (n,), or (n, length) for lists.
      rows: The rows, with their number of values.
    """

    values: Any
    shape: tuple[int, ...]
    rows: Rows


def flat_column(name: str, column: Any, rows: Rows) -> Column:
    """Returns the values of a column of single values, of lists, or of lists of lists.

    Raises:
      DataError: If a list is missing or empty, or lists differ in length.
    """
    shape: tuple[int, ...] = (len(column),)
    while _holds_lists(column.type):
        import pyarrow.compute

        _check_present(name, column, rows)
        lengths = pyarrow.compute.list_value_length(column).to_numpy()
        length = int(lengths[0]) if len(lengths) else 1
        if not length or (lengths != length).any():
            other = int(np.argmax(lengths != length))
            raise DataError(
                f"Column {name!r} must hold lists of one length of at least 1, got a list of "
                f"{length} in {rows.place(0)}"
                + (f" and one of {lengths[other]} in {rows.place(other)}" if other else "")
                + ". Pad the lists to one length, or leave the column out of table.features."
            )
        column = pyarrow.compute.list_flatten(column)
        shape, rows = (*shape, length), rows._replace(values=rows.values * length)
    return Column(column, shape, rows)


def _holds_lists(kind: Any) -> bool:
    import pyarrow

    of_lists = (
        pyarrow.types.is_list,
        pyarrow.types.is_large_list,
        pyarrow.types.is_fixed_size_list,
    )
    return any(is_kind(kind) for is_kind in of_lists)


def check_single(name: str, column: Column) -> None:
    """Raises DataError if a column of a group holds lists."""
    if len(column.shape) > 1:
        raise DataError(
            f"A list of columns in table.features must name columns of single numbers, but "
            f"{name!r} holds lists of {column.shape[1]}. Make it a feature of its own."
        )


def _check_present(name: str, column: Any, rows: Rows) -> None:
    """Raises DataError if a value of a column is missing."""
    if column.null_count:
        import pyarrow.compute

        row = pyarrow.compute.index(column.is_null(), True).as_py()
        raise DataError(
            f"Column {name!r} lacks {column.null_count:,} values, the first in {rows.place(row)}. "
            "Fill them in, or remove the rows."
        )


def type_of_values(kind: Any) -> str:
    """Returns the name of an Arrow type; of lists, that of their values."""
    while _holds_lists(kind):
        kind = kind.value_type
    return str(kind)


def first_text(values: np.ndarray) -> int:
    """Returns the first row whose value is no number, or 0."""
    for row, value in enumerate(values):
        try:
            float(value)
        except (TypeError, ValueError):
            return row
    return 0


def array_of(name: str, column: Any, categories: Sequence[Any] | None, rows: Rows) -> np.ndarray:
    """Returns the values of a column as int64, bool or float32 [values], or their categories.

    Raises:
      DataError: If a value is missing, infinite, beyond int64, text, or not among the categories.
    """
    _check_present(name, column, rows)
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
    row = first_text(values)
    raise DataError(
        f"Column {name!r} holds {column.type}, such as {str(values[row])!r} in {rows.place(row)}, "
        "expected numbers. Correct the value, name the column's values in table.categories, or "
        "leave it out of table.features."
    )


def check_whole(name: str, column: Any, rows: Rows) -> None:
    """Raises DataError if whole numbers of a file would change in a column of float32.

    Such are ids above the range of int64 in a CSV file, which Arrow reads as numbers of float64,
    and a column that holds integers in one file and other numbers in another.
    """
    if str(column.type) != "double" or column.null_count:
        return
    values = column.to_numpy()
    ends = [rows.values * end for end in rows.ends]
    begins = [0, *ends[:-1]]
    for begin, end, types in zip(begins, ends, rows.types, strict=True):
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
        changed &= np.isfinite(rounded)  # `array_of` refuses infinity
        if changed.any():
            row = int(np.argmax(changed))
            rounding = (
                f"list the column in a group in table.features, such as [{name!r}], which is "
                "rounded to float32"
                if rows.values == 1
                else "write the lists as float32 in all files"
            )
            raise DataError(
                f"Column {name!r} must hold whole numbers that float32 can hold, since it becomes "
                f"float32, got {of_file[row]:.0f} in {rows.place(begin + row)}, which would "
                f"become {rounded[row]:.0f}. If such numbers are ids, number them anew from 0 on, "
                "in integers in all files; or write them as text, such as 'id7', and name the "
                f"values in table.categories. If they are measurements, {rounding}."
            )


def _numbered(name: str, values: np.ndarray, categories: list[Any], rows: Rows) -> np.ndarray:
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
