"""Shapes, dtypes, ranges, label counts and rows of a batch as lines of text."""

from collections.abc import Mapping

import numpy as np

_MOST_VALUES = 50
_WIDTH = 76


def described(batch: Mapping[str, np.ndarray]) -> list[str]:
    """Returns a line for each feature: name, dtype and shape of an example, and its range.

    Args:
      batch: Features [b, …] by name.
    """
    rows = [("feature", "dtype", "shape", "values")]
    for name, values in batch.items():
        kind = "string" if values.dtype == object else values.dtype.name
        rows.append((name, kind, str(list(values.shape[1:])), _range(values)))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]])
        for row in rows
    ]


def counts_of(batch: Mapping[str, np.ndarray]) -> list[str]:
    """Returns a line for each feature of one integer or boolean: how often each value occurs.

    Args:
      batch: Features [b, …] by name. Features with more than 50 values are left out.
    """
    lines = []
    for name, values in batch.items():
        if values.ndim != 1 or values.dtype.kind not in "iub":
            continue
        found, counts = np.unique(values, return_counts=True)
        if len(found) <= _MOST_VALUES:
            pairs = zip(found.tolist(), counts.tolist(), strict=True)
            lines.append(f"{name}: " + ", ".join(f"{value} × {count}" for value, count in pairs))
    return lines


def rows_as_text(batch: Mapping[str, np.ndarray], row: int) -> list[str]:
    """Returns a line for each feature of one example; long values are cut.

    Args:
      batch: Features [b, …] by name.
      row: Number of the example in the batch.
    """
    lines = []
    for name, values in batch.items():
        value = values[row]
        if isinstance(value, bytes):
            shown = repr(value.decode("utf-8", "backslashreplace"))
        else:
            shown = np.array2string(np.asarray(value), threshold=16, edgeitems=4, precision=4)
        shown = " ".join(shown.split())
        lines.append(f"{name}: {shown if len(shown) <= _WIDTH else shown[: _WIDTH - 1] + '…'}")
    return lines


def _range(values: np.ndarray) -> str:
    if values.dtype.kind == "b":
        return f"{values.mean():.0%} true"
    if values.dtype.kind not in "iuf" or not values.size:
        lengths = [len(one) for one in values.ravel()] if values.dtype == object else []
        return f"{min(lengths)} to {max(lengths)} bytes" if lengths else ""
    return f"{values.min():.4g} to {values.max():.4g}, mean {values.mean(dtype=np.float64):.4g}"
