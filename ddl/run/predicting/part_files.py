"""Files of some rows of the predictions: each column under its name, texts without padding.

The names begin with the kind of the content, so that no two columns can share one: a column may be
called `x.lengths` beside texts that are called `x`.
"""

import io
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from ddl.errors import ModelDirectoryError
from ddl.run.predicting.columns import Column, forms_of


def packed(columns: Mapping[str, np.ndarray]) -> bytes:
    """Returns the content of a file of columns [n, …], as `columns_of` returns them."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_STORED) as archive:
        for name, values in columns.items():
            if values.dtype.kind == "O":
                texts = [text.encode() for text in values.flat]
                lengths = np.array([len(text) for text in texts], np.int64)
                archive.writestr(f"texts/{name}.utf8", b"".join(texts))
                archive.writestr(f"lengths/{name}.npy", _npy(lengths.reshape(values.shape)))
            else:
                archive.writestr(f"values/{name}.npy", _npy(values))
    return content.getvalue()


def _npy(values: np.ndarray) -> bytes:
    member = io.BytesIO()
    np.lib.format.write_array(member, np.ascontiguousarray(values), allow_pickle=False)
    return member.getvalue()


def read_part(path: Path, rows: int, columns: Sequence[Column]) -> dict[str, np.ndarray]:
    """Returns columns [rows, …] of a file by name.

    Args:
      path: The file.
      rows: Number of its rows.
      columns: The columns to read.

    Raises:
      ModelDirectoryError: If it cannot be read, or a column is missing or has another form.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            found = {column.name: _column(archive, column) for column in columns}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise _damaged(path, str(error)) from error
    for column, form in zip(columns, forms_of(found), strict=True):
        if form != column or len(found[column.name]) != rows:
            got = f"{len(found[column.name]):,} rows of {form}"
            raise _damaged(path, f"expected {rows:,} rows of {column}, got {got}")
    return found


def _column(archive: zipfile.ZipFile, column: Column) -> np.ndarray:
    is_text = column.dtype == "str"
    member = archive.read(f"{'lengths' if is_text else 'values'}/{column.name}.npy")
    values = np.lib.format.read_array(io.BytesIO(member), allow_pickle=False)
    if not is_text:
        return values
    content = archive.read(f"texts/{column.name}.utf8")
    ends = np.cumsum(values).tolist()
    starts = [0, *ends][:-1]
    texts = np.empty(values.size, object)
    texts[:] = [content[start:end].decode() for start, end in zip(starts, ends, strict=True)]
    return texts.reshape(values.shape)


def _damaged(path: Path, why: str) -> ModelDirectoryError:
    return ModelDirectoryError(
        f"{path} is damaged: {why}. Remove it and run the same command again, which computes its "
        "rows anew."
    )
