"""Files of predictions as JSON lines, `.npz` and Parquet, written row by row."""

import io
import json
import os
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from ddl.choices import PREDICTIONS
from ddl.errors import ConfigError, either
from ddl.run.predicting.columns import Column

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
                "Parquet files need pyarrow, which is not installed. Run: pip install "
                "'ddl[tables]', or write .jsonl or .npz."
            ) from error


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
    with open(path, "wb") as file:
        FORMATS[os.path.splitext(name)[1]](file, columns, rows, parts)
        file.flush()
        os.fsync(file.fileno())


def _write_json_lines(file: IO[bytes], columns: Sequence[Column], rows: int, parts: Parts) -> None:
    keys = [json.dumps(column.name, ensure_ascii=False) for column in columns]
    for part in parts(None):
        texts = [_json_texts(part[column.name]) for column in columns]
        for values in zip(*texts, strict=True):
            pairs = (f"{key}: {value}" for key, value in zip(keys, values, strict=True))
            file.write(f"{{{', '.join(pairs)}}}\n".encode())


def _json_texts(values: np.ndarray) -> Iterator[str]:
    """Yields each row as JSON, which has no NaN and no infinity: null, and a number beyond all."""
    finite = values.dtype.kind != "f" or np.isfinite(values).all()
    for row in values:
        text = json.dumps(row.tolist(), ensure_ascii=False)
        yield text if finite else text.replace("NaN", "null").replace("Infinity", "1e999")


def _write_npz(file: IO[bytes], columns: Sequence[Column], rows: int, parts: Parts) -> None:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for column in columns:
            dtype = np.dtype(column.dtype)
            if column.dtype == "str":
                widest = max(part[column.name].dtype.itemsize for part in parts([column.name]))
                dtype = np.dtype(f"<U{widest // 4}")
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
                    values = part[column.name].astype(dtype, copy=False)
                    member.write(np.ascontiguousarray(values).tobytes())


def _write_parquet(file: IO[bytes], columns: Sequence[Column], rows: int, parts: Parts) -> None:
    import pyarrow
    from pyarrow import parquet

    types = {column.name: _arrow_type(column, pyarrow) for column in columns}
    schema = pyarrow.schema(list(types.items()))
    row_bytes = sum(column.row_bytes for column in columns)
    of_group = max(1, min(_GROUP_ROWS, _GROUP_BYTES // row_bytes))
    with parquet.ParquetWriter(file, schema) as writer:
        for group in _regrouped(parts(None), of_group):
            arrays = [_arrow_array(group[name], kind, pyarrow) for name, kind in types.items()]
            writer.write_table(pyarrow.Table.from_arrays(arrays, schema=schema))


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


def _regrouped(
    parts: Iterable[dict[str, np.ndarray]], rows: int
) -> Iterator[dict[str, np.ndarray]]:
    """Yields the same rows in groups of `rows`, whatever the sizes of the parts; the last fewer."""
    waiting: list[dict[str, np.ndarray]] = []
    held = 0
    for part in parts:
        waiting.append(part)
        held += _length(part)
        while held >= rows:
            joined = _joined(waiting)
            yield {name: values[:rows] for name, values in joined.items()}
            waiting = [{name: values[rows:] for name, values in joined.items()}]
            held -= rows
    if held:
        yield _joined(waiting)


def _length(part: dict[str, np.ndarray]) -> int:
    return len(next(iter(part.values())))


def _joined(parts: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    if len(parts) == 1:
        return parts[0]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


_Writer = Callable[[IO[bytes], Sequence[Column], int, Parts], None]
FORMATS: dict[str, _Writer] = dict(
    zip(PREDICTIONS, (_write_json_lines, _write_npz, _write_parquet), strict=True)
)
