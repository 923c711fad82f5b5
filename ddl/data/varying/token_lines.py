"""Lines of text files as token numbers of varying length."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ddl.data.formats.integers import check_int64
from ddl.data.formats.text import line_bounds, mapped
from ddl.data.random_access import RandomAccessSource
from ddl.data.storage.file_sets import paths_of
from ddl.errors import ConfigError, DataError


class _TokenLines(RandomAccessSource):
    """A source that knows the length of each example.

    Attributes:
      lengths: int64 [n].
    """

    def __init__(self, lookup: Callable[[np.ndarray], dict[str, Any]], lengths: np.ndarray):
        self.lengths = lengths
        super().__init__(lookup, len(lengths))


def token_lines(
    files: str | Sequence[str],
    *,
    encode: Callable[[list[bytes]], Sequence[Sequence[int]]] | None = None,
) -> RandomAccessSource:
    """Builds a source of the tokens of each line of text files, to pack.

    Empty lines are left out.

    Args:
      files: Path of a file, or a list of paths.
      encode: Turns a list of lines into as many lists of token numbers, such as a tokenizer's
        method. All lines are encoded once, at the start, and kept in memory. None takes the bytes
        of a line, from files that are memory-mapped.

    Returns:
      Features `token`, int64 [tokens of the longest line], with zeros at the end, and `length`,
      int64 [], the number of tokens that count.

    Raises:
      ConfigError: If `encode` returns another number of lists.
      DataError: If a file is missing, or there are no lines.
    """
    texts = mapped(files, "token_lines", np.uint8)
    bounds = [line_bounds(text) for text in texts]
    if not sum(map(len, bounds)):
        raise DataError(
            f"token_lines.files must have at least one line that is not empty, got {len(texts):,} "
            f"files without any: {files!r:.200}. Pass files with text."
        )
    if encode is not None:
        lines = [
            text[first:last].tobytes()
            for text, of_file in zip(texts, bounds, strict=True)
            for first, last in of_file
        ]
        encoded = [_integers(line) for line in encode(lines)]
        if len(encoded) != len(lines):
            raise ConfigError(
                f"token_lines.encode must return a list of tokens for each of the {len(lines):,} "
                f"lines, got {len(encoded):,} lists."
            )
        ends = np.cumsum([len(line) for line in encoded])
        texts = [np.concatenate(encoded)]
        bounds = [np.stack([np.concatenate([[0], ends[:-1]]), ends], axis=1)]
    file_numbers = np.repeat(np.arange(len(texts)), [len(each) for each in bounds])
    spans = np.concatenate(bounds)
    lengths = spans[:, 1] - spans[:, 0]
    longest = max(int(lengths.max()), 1)

    def lookup(indices: np.ndarray) -> dict[str, np.ndarray]:
        tokens = np.zeros([len(indices), longest], np.int64)
        for row, index in enumerate(indices):
            first, last = spans[index]
            tokens[row, : last - first] = texts[file_numbers[index]][first:last]
        return {"token": tokens, "length": lengths[indices]}

    source = _TokenLines(lookup, lengths)
    source.files_read = paths_of(files)
    return source


def _integers(tokens: Any) -> np.ndarray:
    array = np.asarray(tokens)
    if array.size and array.dtype.kind not in "iu":
        raise ConfigError(
            f"token_lines.encode must return the numbers of tokens, integers, got {array.dtype}: "
            f"{tokens!r:.60}."
        )
    check_int64(array, lambda place: f"Number {place:,} of the tokens of a line, {tokens!r:.60},")
    return array.astype(np.int64)
