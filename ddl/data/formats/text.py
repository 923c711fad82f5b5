"""Text files: by line, or as windows of tokens for language models."""

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ddl.data.formats.integers import check_int64
from ddl.data.random_access import RandomAccessSource
from ddl.data.storage.file_sets import check_files, paths_of
from ddl.data.storage.shared_memory import aligned_empty, shared_tensor
from ddl.errors import ConfigError, DataError

_NEW_LINE = 10
_CHUNK = 1 << 24

_COMPRESSED = {
    ".gz": b"\x1f\x8b\x08",
    ".zst": b"\x28\xb5\x2f\xfd",
    ".xz": b"\xfd7zXZ\x00",
    ".bz2": b"BZh",
}
"""First bytes of compressed files, none of which begin a text in UTF-8 but those of `.bz2`."""


def text_lines(
    files: str | Sequence[str],
    *,
    name: str = "text",
    encode: Callable[[list[bytes]], dict[str, Any]] | None = None,
) -> RandomAccessSource:
    r"""Builds a source in which each line of text files is an example.

    The files are memory-mapped, so that a batch reads only its own lines. Empty lines are left
    out. Lines end with "\n" or "\r\n".

    Args:
      files: Path of a file, or a list of paths.
      name: Name of the feature, string [], that holds the line's bytes.
      encode: Turns b lines into features [b, …] of static shape, such as token numbers padded to
        one length. None gives the line itself.

    Raises:
      DataError: If a file is missing, compressed or listed twice, or there are no lines.
    """
    texts = mapped(files, "text_lines", np.uint8)
    spans = [line_bounds(text) for text in texts]
    file_numbers = np.repeat(np.arange(len(texts)), [len(span) for span in spans])
    bounds = np.concatenate(spans)
    # A slice of a view takes a tenth of the time of numpy's.
    views = [text.data for text in texts]
    if not len(bounds):
        raise DataError(
            f"text_lines.files must have at least one line that is not empty, got {len(texts):,} "
            f"files without any: {files!r:.200}. Pass files with text."
        )

    def lookup(indices: np.ndarray) -> dict[str, Any]:
        places = zip(file_numbers[indices].tolist(), bounds[indices].tolist(), strict=True)
        lines = [views[number][begin:end].tobytes() for number, (begin, end) in places]
        return encode(lines) if encode else {name: np.array(lines, object)}

    source = RandomAccessSource(lookup, len(bounds))
    source.reads_ahead = encode is None
    source.files_read = paths_of(files)
    return source


def token_windows(
    files: str | Sequence[str],
    length: int,
    *,
    dtype: str = "uint8",
) -> RandomAccessSource:
    """Builds a source of windows of tokens, each with the token that follows, for language models.

    The first token of a window follows the last one of the window before it in the file, so that
    every token but the first of a file is predicted once an epoch. Tokens at the end of a file that
    fill no window are left out.

    Args:
      files: Path of a file, or a list of paths: text, whose bytes are the tokens; binary files of
        numbers, as numpy's `tofile` writes them; or `.npy` files of integers [n].
      length: Tokens of a window, at least 1.
      dtype: Dtype of the numbers of binary files: "uint8", "uint16", "int32" or "int64". It is
        ignored for `.npy` files.

    Returns:
      Features "token" and "next_token", both int64 [length].

    Raises:
      ConfigError: If `length` is below 1, or `dtype` is another one.
      DataError: If a file is missing, compressed or listed twice, is no whole number of tokens, or
        no file has `length` + 1 tokens. While reading: if a token is beyond int64.
    """
    if length < 1:
        raise ConfigError(f"token_windows.length must be at least 1, got {length}.")
    if dtype not in ("uint8", "uint16", "int32", "int64"):
        raise ConfigError(
            f"token_windows.dtype must be uint8, uint16, int32 or int64, got {dtype!r}."
        )
    tokens = mapped(files, "token_windows", np.dtype(dtype))
    counts = np.array([max(len(each) - 1, 0) // length for each in tokens])
    if not counts.sum():
        raise DataError(
            f"No file has the {length + 1:,} tokens that a window of {length:,} and the token "
            f"after it need; the longest has {max(map(len, tokens)):,}. Set token_windows.length "
            "to a smaller number."
        )
    ends = np.cumsum(counts)
    names = paths_of(files)
    of_file = [_windows(each, length) for each in tokens]

    def lookup(indices: np.ndarray) -> dict[str, np.ndarray]:
        numbers = np.searchsorted(ends, indices, side="right")
        rows = indices - (ends - counts)[numbers]
        found = {
            name: aligned_empty([len(indices), length], np.int64)
            for name in ("token", "next_token")
        }
        for number in np.unique(numbers):
            places = np.flatnonzero(numbers == number)
            starts = rows[places] * length
            windows = of_file[number][starts]

            def named(place: int, starts: np.ndarray = starts, file: str = names[number]) -> str:
                row, column = divmod(place, length + 1)
                return f"Token number {starts[row] + column:,} of {file}"

            check_int64(windows, named)
            found["token"][places] = windows[:, :-1]
            found["next_token"][places] = windows[:, 1:]
        return found

    source = _Windows(lookup, int(ends[-1]), tokens[0] if len(tokens) == 1 else None, length)
    source.files_read = names
    return source


class _Windows(RandomAccessSource):
    """Windows of tokens; those of a single file are gathered in it, without Python."""

    reads_ahead = True
    maps_files = True

    def __init__(
        self,
        lookup: Callable[[np.ndarray], dict[str, np.ndarray]],
        count: int,
        tokens: np.ndarray | None,
        length: int,
    ):
        super().__init__(lookup, count)
        self._tokens = tokens
        self._window = length

    @functools.cached_property
    def _shared(self) -> tuple[tf.Tensor, tf.Tensor] | None:
        """All tokens, [n], and the windows without the token after each, [count, length]."""
        # Numbers of uint64 are checked in Python.
        if self._tokens is None or self._tokens.dtype == np.uint64:
            return None
        windows = self._tokens[: len(self) * self._window].reshape(len(self), self._window)
        shared = shared_tensor(self._tokens), shared_tensor(windows)
        return None if shared[0] is None or shared[1] is None else (shared[0], shared[1])

    @tf.autograph.experimental.do_not_convert
    def gather(self, indices: tf.Tensor) -> dict[str, tf.Tensor]:
        if self._shared is None:
            return super().gather(indices)
        tokens, windows = self._shared
        found = tf.gather(windows, indices)
        after = tf.gather(tokens, (indices + 1) * self._window)
        following = tf.concat([found[:, 1:], after[:, tf.newaxis]], axis=1)
        return {"token": tf.cast(found, tf.int64), "next_token": tf.cast(following, tf.int64)}


def _windows(tokens: np.ndarray, length: int) -> np.ndarray:
    """Returns a view of the tokens: all windows of `length` + 1, one for each token."""
    size = length + 1
    if len(tokens) < size:
        return np.zeros([0, size], tokens.dtype)
    return np.lib.stride_tricks.sliding_window_view(np.asarray(tokens), size)


def mapped(files: str | Sequence[str], user: str, dtype: np.dtype | type) -> list[np.ndarray]:
    """Returns the files' contents, memory-mapped, each an array [n]."""
    paths = paths_of(files)
    if not paths:
        raise DataError(f"{user}.files is empty. Pass at least one path.")
    check_files(paths, f"{user}.files")
    return [_mapped_file(path, np.dtype(dtype)) for path in paths]


def _mapped_file(file: str, dtype: np.dtype) -> np.ndarray:
    try:
        if file.endswith(".npy"):
            array = np.load(file, mmap_mode="r", allow_pickle=False)
            if array.ndim != 1 or array.dtype.kind not in "iu":
                raise DataError(
                    f"{file} must hold integers [n], got {array.dtype} of shape {array.shape}. "
                    "Save the numbers of the tokens in one dimension."
                )
            return array
        _check_uncompressed(file, dtype)
        size = os.path.getsize(file)
        if size % dtype.itemsize:
            raise DataError(
                f"{file} has {size:,} bytes, which are no whole number of {dtype} tokens. Set "
                "dtype to the one that the file was written with."
            )
        return np.memmap(file, dtype, "r") if size else np.zeros(0, dtype)
    except (OSError, ValueError) as error:
        raise DataError(
            f"{file} could not be read: {error}. Correct the path, or the file."
        ) from error


def _check_uncompressed(file: str, dtype: np.dtype) -> None:
    """Raises DataError if a file of text, or of tokens, is compressed."""
    found = [ending for ending in _COMPRESSED if file.endswith(ending)]
    if not found and dtype == np.uint8:  # wider tokens may begin with any bytes
        with open(file, "rb") as opened:
            first = opened.read(8)
        found = [e for e, known in _COMPRESSED.items() if e != ".bz2" and first.startswith(known)]
    if found:
        raise DataError(
            f"{file} must not be compressed, since ddl reads it at any position, got a {found[0]} "
            "file. Decompress it."
        )


def line_bounds(text: np.ndarray) -> np.ndarray:
    """Returns begin and end of each line that is not empty, int64 [n, 2]."""
    ends = [
        start + np.flatnonzero(text[start : start + _CHUNK] == _NEW_LINE)
        for start in range(0, len(text), _CHUNK)
    ]
    last = np.concatenate([*ends, [len(text)]]).astype(np.int64)
    begin = np.concatenate([[0], last[:-1] + 1]).astype(np.int64)
    begin, last = begin[: len(last)], np.maximum(last, begin[: len(last)])
    if len(text):
        returns = (last > begin) & (text[np.maximum(last - 1, 0)] == ord("\r"))
        last = last - returns
    return np.stack([begin, last], axis=1)[last > begin]
