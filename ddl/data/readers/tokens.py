"""Tokens for language models: windows of a running text, and documents, packed or padded."""

import os
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np

from ddl.choices import check_count
from ddl.data.order import in_parts, random_words
from ddl.data.readers.paths import Paths, found_files
from ddl.data.source import Source
from ddl.errors import DataError, check_choice

_OTHERS = (".gz", ".zst", ".xz", ".bz2", ".zip", ".npy")
_PACKING = 0x7061636B  # apart from other uses of the seed


class Documents(list[np.ndarray]):
    """Documents, each an array of tokens, integers [length].

    Attributes:
      files: Paths of the files that hold them.
    """

    files: Sequence[str] = ()


def tokens(files: Paths | np.ndarray, length: int, *, dtype: str = "uint8") -> Source:
    """Cuts a running text into windows of tokens, each with the token that follows.

    The first token of a window follows the last one of the window before it in the file, so that
    every token but the first of a file is predicted once an epoch. Tokens at the end of a file that
    fill no window are left out. Files are memory-mapped.

    Args:
      files: Path of a file, or a list of paths: text, whose bytes are the tokens; binary files of
        numbers, as NumPy's `tofile` writes them. Or the tokens, an array of integers [n], such as
        `np.load("tokens.npy", mmap_mode="r")`.
      length: Tokens of a window.
      dtype: Dtype of the numbers of binary files: "uint8", "uint16", "uint32", "int32" or "int64".
        It is ignored for arrays.

    Returns:
      Features "token" and "next_token", both int64 [length].

    Raises:
      ConfigError: If `length` is below 1, or `dtype` is another one.
      DataError: If a file is missing, compressed, listed twice or no whole number of tokens; tokens
        are no integers [n] that int64 holds; or no file has `length` + 1 tokens.
    """
    check_count("tokens.length", length)
    check_choice("tokens.dtype", dtype, ("uint8", "uint16", "uint32", "int32", "int64"))
    if isinstance(files, np.ndarray):
        paths, texts = [], [_checked_tokens(files, "tokens.files")]
    else:
        paths = found_files(files, "tokens.files")
        texts = [_mapped(path, np.dtype(dtype)) for path in paths]
    windows = Windows(texts, length)
    if not len(windows):
        longest = max(map(len, texts))
        raise DataError(f"tokens.length, {length:,}, must be below that of any text, {longest:,}.")
    return Source(windows, files=paths)


class Windows:
    """Windows of texts, each with the token that follows; see `tokens`."""

    def __init__(self, texts: Sequence[np.ndarray], length: int):
        """Takes texts, integers [n], and the tokens of a window."""
        self._texts, self._length = texts, length
        self._ends = np.cumsum([max(len(text) - 1, 0) // length for text in texts])

    def __len__(self) -> int:
        """Returns the number of windows."""
        return int(self._ends[-1])

    def rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the windows at indices, int64 [b], as arrays [b, length]."""
        found = np.empty([len(indices), self._length + 1], np.int64)
        numbers, indices = in_parts(indices, self._ends)
        for number in np.unique(numbers):
            own = numbers == number
            starts = indices[own, np.newaxis] * self._length
            found[own] = self._texts[number][starts + np.arange(self._length + 1)]
        return {"token": found[:, :-1], "next_token": found[:, 1:]}


def token_lines(files: Paths) -> Documents:
    r"""Reads each line of text files as a document, whose bytes are the tokens, for `packed`.

    Empty lines are left out. Lines end with "\n" or "\r\n". All are kept in memory. Pass `packed`
    your tokenizer's own lists instead for other tokens.

    Args:
      files: Path of a file, or a list of paths.

    Raises:
      DataError: If a file is missing, compressed or listed twice.
    """
    paths = found_files(files, "token_lines.files")
    texts = [_mapped(path, np.dtype("uint8")).tobytes() for path in paths]
    lines = [line for text in texts for line in text.replace(b"\r\n", b"\n").split(b"\n") if line]
    found = Documents(np.frombuffer(line, np.uint8) for line in lines)
    found.files = tuple(paths)
    return found


def packed(
    sequences: Iterable[Sequence[int] | np.ndarray],
    length: int,
    *,
    seed: int = 0,
    too_long: Literal["error", "cut", "split"] = "error",
    alone: bool = False,
) -> Source:
    """Packs documents of varying length into rows of one length, so that there is little padding.

    Each row holds whole documents one after the other, and padding at its end. The longest document
    is placed first, each in the row with the least free space that holds it (Krell et al. 2021,
    "Efficient Sequence Packing without Cross-contamination"). The rows are decided once, from the
    lengths and `seed`; an epoch shuffles rows and holds each document once.

        ddl.data.packed(ddl.data.token_lines("text.txt"), 256, too_long="split")

    Args:
      sequences: The documents, each a list or array of tokens: `token_lines(…)`, or your own.
        Empty ones are left out.
      length: Tokens of a row.
      seed: Seed of the choice among documents of the same length, and of their order in a row.
      too_long: Treatment of documents of more than `length` tokens: "error" refuses them, "cut"
        leaves out the tokens beyond, "split" makes several documents of them.
      alone: Whether each document has a row of its own, padded to `length`, in their own order.

    Returns:
      Rows with the features, each [length]: "token", int64, 0 for padding; "next_token", int64;
      "token_weight", float32, 1 where "next_token" is of the same document and else 0; "segment",
      int64, the number of the document in the row, from 1 on, and 0 for padding; "position", int64,
      of the token in its document, from 0 on. `source.items` is a `PackedRows`.

    Raises:
      ConfigError: If `length` is below 1 or `too_long` is another.
      DataError: If a document is no list of integers, one is too long, or all are empty.
    """
    check_count("packed.length", length)
    check_choice("packed.too_long", too_long, ("error", "cut", "split"))
    documents = [_checked_tokens(o, f"packed.sequences[{n:,}]") for n, o in enumerate(sequences)]
    lengths = np.array([len(document) for document in documents], np.int64)
    longest = lengths.max(initial=0)
    if longest > length and too_long == "error":
        raise DataError(
            f"Document {int(np.argmax(lengths)):,} has {longest:,} tokens, but packed.length is "
            f"{length:,}. Increase it, or set packed.too_long to 'split' or 'cut'."
        )
    pieces = _pieces(lengths, length, too_long == "split")
    row = np.arange(len(pieces)) if alone else _packing(pieces[:, 2], length, seed)
    order = np.lexsort([random_words(seed, 1, len(pieces), _PACKING), row])
    rows = PackedRows(documents, pieces[order], row[order], length)
    return Source(rows, files=getattr(sequences, "files", ()))


class PackedRows:
    """Rows of several documents each; see `packed`.

    Attributes:
      digest_of_packing: A number that differs if other pieces of documents stand in the rows, so
        that a run is not resumed with them.
    """

    def __init__(
        self, documents: Sequence[np.ndarray], pieces: np.ndarray, row: np.ndarray, length: int
    ):
        """Takes the rows' contents.

        Args:
          documents: The documents.
          pieces: Document, first token and number of tokens of each piece, int64 [n, 3].
          row: Row of each piece, int64 [n], not falling, none left out.
          length: Tokens of a row.
        """
        self._documents, self._pieces, self._length = documents, pieces, length
        self.digest_of_packing = zlib.crc32(pieces.tobytes(), zlib.crc32(row.tobytes()))
        self._first = np.concatenate([[0], np.cumsum(np.bincount(row))])

    def __len__(self) -> int:
        """Returns the number of rows."""
        return len(self._first) - 1

    def rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the rows at indices, int64 [b], as arrays [b, length]."""
        shape = len(indices), self._length
        token, following, segment, position = (np.zeros(shape, np.int64) for _ in range(4))
        for row, index in enumerate(indices):
            begin = 0
            pieces = self._pieces[self._first[index] : self._first[index + 1]].tolist()
            for number, (document, first, length) in enumerate(pieces, 1):
                end = begin + length
                token[row, begin:end] = self._documents[document][first : first + length]
                segment[row, begin:end] = number
                position[row, begin:end] = np.arange(length)
                begin = end
        continues = np.zeros(shape, bool)
        continues[:, :-1] = (segment[:, 1:] == segment[:, :-1]) & (segment[:, 1:] > 0)
        following[:, :-1] = np.where(continues[:, :-1], token[:, 1:], 0)
        found = {"token": token, "next_token": following, "segment": segment, "position": position}
        return found | {"token_weight": continues.astype(np.float32)}


def _mapped(file: str, dtype: np.dtype) -> np.ndarray:
    """Returns a file's tokens, memory-mapped, integers [n]."""
    if file.endswith(_OTHERS):
        raise DataError(f"{file} must be plain text or numbers. Decompress it, or pass np.load(…).")
    size = os.path.getsize(file)
    if size % dtype.itemsize:
        raise DataError(f"{file} has {size:,} bytes, no whole number of {dtype}. Set tokens.dtype.")
    # A plain array is sliced several times as fast as a memory map.
    return np.asarray(np.memmap(file, dtype, "r")) if size else np.zeros(0, dtype)


def _checked_tokens(numbers: Any, what: str) -> np.ndarray:
    """Returns numbers as an array after checking that they are integers [n] that int64 holds."""
    array = np.asarray(numbers)
    fits = array.dtype.kind in "iu" and array.dtype != np.uint64
    if array.ndim != 1 or (array.size and not fits):
        raise DataError(f"{what} must be integers [n] of int64, got {array.dtype} {array.shape}.")
    return array


def _pieces(lengths: np.ndarray, most: int, split: bool) -> np.ndarray:
    """Returns the pieces of documents: document, first token and length, int64 [pieces, 3]."""
    counts = -(-lengths // most) if split else np.minimum(lengths, 1)
    if not counts.sum():
        raise DataError("packed.sequences must have at least one document with tokens.")
    document = np.repeat(np.arange(len(lengths)), counts)
    first = (np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)) * most
    return np.stack([document, first, np.minimum(lengths[document] - first, most)], axis=1)


def _packing(lengths: np.ndarray, row_length: int, seed: int) -> np.ndarray:
    """Returns the row of each document, int64 [n]: best fit, the longest first."""
    order = np.lexsort([random_words(seed, 0, len(lengths), _PACKING), -lengths])
    row_of = np.empty(len(lengths), np.int64)
    with_space: list[list[int]] = [[] for _ in range(row_length)]  # rows by their free space
    with_space.append(list(range(len(lengths)))[::-1])  # the empty rows, the first one last
    has_rows = np.arange(row_length + 1) == row_length
    for document, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        free = length + int(np.argmax(has_rows[length:]))
        row_of[document] = row = with_space[free].pop()
        has_rows[free] = bool(with_space[free])
        with_space[free - length].append(row)
        has_rows[free - length] = True
    return row_of
