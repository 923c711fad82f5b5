"""Files of predictions as JSON lines, `.npz` and Parquet, written row by row."""

import io
import json
import math
import os
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from ddl.choices import PREDICTIONS
from ddl.errors import ConfigError, either, installing
from ddl.run.predicting.columns import Column, bytes_of_rows

Parts = Callable[[Sequence[str] | None], Iterable[dict[str, np.ndarray]]]
"""Reads the parts of the predictions in order: their columns of these names, or all of them."""

_GROUP_BYTES, _GROUP_ROWS = 16 << 20, 1 << 16
_ZIP_DATE = (1980, 1, 1, 0, 0, 0)  # of each entry, so that equal predictions are equal files


def check_format(path: str) -> None:
    """Checks that a format belongs to the ending of a file's name, and that it can be written.

    Raises:
      ConfigError: If there is no such format, or pyarrow is missing.
    """
    ending = os.path.splitext(path)[1]
    if ending not in FORMATS:
        raise ConfigError(
            f"--predictions must end with {either(FORMATS)}, got {path}. Change its ending."
        )
    if ending == ".parquet":
        try:
            import pyarrow.parquet  # noqa: F401
        except ImportError as error:
            raise ConfigError(
                "Parquet files need pyarrow, which is not installed. "
                f"{installing('tables')} Or write .jsonl or .npz."
            ) from error


def check_columns(path: str, columns: Sequence[Column]) -> None:
    """Checks that a format can hold columns, before more than one batch is computed.

    Raises:
      ConfigError: If there are none, or Parquet is to hold an array without values.
    """
    if not columns:
        raise ConfigError("predict returned no output. Return at least one tensor.")
    empty = next((column for column in columns if 0 in column.shape), None)
    if empty is not None and os.path.splitext(path)[1] == ".parquet":
        raise ConfigError(
            f"Parquet cannot hold the column {empty}, whose rows have no values. Leave it out of "
            "predict, or write .jsonl or .npz."
        )


def write_rows(path: Path, name: str, columns: Sequence[Column], rows: int, parts: Parts) -> None:
    """Writes all predictions, and syncs the file to disk. The memory holds a few parts.

    Args:
      path: The file to write.
      name: Name of the file whose ending says the format.
      columns: The columns.
      rows: Number of rows of all parts.
      parts: Reads the parts.

    Raises:
      OSError: If the file cannot be written.
    """
    path.unlink(missing_ok=True)  # left by a crash, or a link that somebody planted
    with open(path, "xb") as file:
        FORMATS[os.path.splitext(name)[1]](file, columns, rows, parts)
        file.flush()
        os.fsync(file.fileno())


def _write_json_lines(file: IO[bytes], columns: Sequence[Column], rows: int, parts: Parts) -> None:
    keys = [_json_text(column.name) for column in columns]
    for part in parts(None):
        texts = [_json_texts(part[column.name]) for column in columns]
        for values in zip(*texts, strict=True):
            pairs = (f"{key}: {value}" for key, value in zip(keys, values, strict=True))
            file.write(f"{{{', '.join(pairs)}}}\n".encode())


def _json_texts(values: np.ndarray) -> Iterator[str]:
    """Yields each row as JSON, which has no NaN and no infinity: null, and a number beyond all."""
    if values.dtype.kind == "O":
        yield from (_json_text(row if isinstance(row, str) else row.tolist()) for row in values)
        return
    finite = values.dtype.kind != "f" or np.isfinite(values).all()
    for row in values:
        text = json.dumps(row.tolist())
        yield text if finite else text.replace("NaN", "null").replace("Infinity", "1e999")


def _json_text(text: Any) -> str:
    """Returns texts as JSON. Many readers take two characters of Unicode for ends of lines."""
    written = json.dumps(text, ensure_ascii=False)
    return written.replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _write_npz(file: IO[bytes], columns: Sequence[Column], rows: int, parts: Parts) -> None:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for column in columns:
            if column.dtype == "str":
                # numpy gives at least one character to a text.
                each = (
                    len(text) for part in parts([column.name]) for text in part[column.name].flat
                )
                dtype = np.dtype(f"<U{max(1, max(each, default=1))}")
            else:
                dtype = np.dtype(column.dtype)
            of_slice = max(1, _GROUP_BYTES // max(1, dtype.itemsize * math.prod(column.shape)))
            header = io.BytesIO()
            description = {
                "descr": np.lib.format.dtype_to_descr(dtype),
                "fortran_order": False,
                "shape": (rows, *column.shape),
            }
            np.lib.format.write_array_header_2_0(header, description)
            entry = zipfile.ZipInfo(f"{column.name}.npy", _ZIP_DATE)
            with archive.open(entry, "w", force_zip64=True) as member:
                member.write(header.getvalue())
                for part in parts([column.name]):
                    values = part[column.name]
                    for first in range(0, len(values), of_slice):
                        few = values[first : first + of_slice].astype(dtype, copy=False)
                        member.write(np.ascontiguousarray(few).tobytes())


def _write_parquet(file: IO[bytes], columns: Sequence[Column], rows: int, parts: Parts) -> None:
    import pyarrow
    from pyarrow import parquet

    types = {column.name: _arrow_type(column, pyarrow) for column in columns}
    schema = pyarrow.schema(list(types.items()))
    with parquet.ParquetWriter(file, schema) as writer:
        for group in _groups(parts(None)):
            arrays = [
                pyarrow.chunked_array([_arrow_array(part[name], kind, pyarrow) for part in group])
                for name, kind in types.items()
            ]
            # In one piece, since the bytes of the file depend on the pieces.
            table = pyarrow.Table.from_arrays(arrays, schema=schema).combine_chunks()
            writer.write_table(table, row_group_size=_GROUP_ROWS)


def _arrow_type(column: Column, pyarrow: Any) -> Any:
    """Returns the type of a column: lists of fixed size within each other for arrays."""
    if column.dtype == "str":
        kind = pyarrow.string()
    else:
        kind = pyarrow.from_numpy_dtype(np.dtype(column.dtype))
    for size in reversed(column.shape):
        kind = pyarrow.list_(kind, size)
    return kind


def _arrow_array(values: np.ndarray, kind: Any, pyarrow: Any) -> Any:
    sizes = values.shape[1:]
    for _ in sizes:
        kind = kind.value_type
    array = pyarrow.array(values.ravel(), kind)
    for size in reversed(sizes):
        array = pyarrow.FixedSizeListArray.from_arrays(array, size)
    return array


def _groups(parts: Iterable[dict[str, np.ndarray]]) -> Iterator[list[dict[str, np.ndarray]]]:
    """Yields the rows in groups of parts, which depend only on the rows, not on the parts.

    A group ends with the row that fills its bytes or its rows; the last one may be smaller.
    """
    group: list[dict[str, np.ndarray]] = []
    held = size = 0
    for part in parts:
        ends = np.cumsum(bytes_of_rows(part))
        first = 0
        while first < len(ends):
            before = int(ends[first - 1]) if first else 0
            full = int(np.searchsorted(ends, before + _GROUP_BYTES - size)) + 1
            end = min(full, first + _GROUP_ROWS - held, len(ends))
            group.append({name: values[first:end] for name, values in part.items()})
            held, size, first = held + end - first, size + int(ends[end - 1]) - before, end
            if held == _GROUP_ROWS or size >= _GROUP_BYTES:
                yield group
                group, held, size = [], 0, 0
    if group:
        yield group


_Writer = Callable[[IO[bytes], Sequence[Column], int, Parts], None]
FORMATS: dict[str, _Writer] = dict(
    zip(PREDICTIONS, (_write_json_lines, _write_npz, _write_parquet), strict=True)
)
