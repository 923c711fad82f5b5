"""Rows of one length, each packed with several documents."""

import zlib
from typing import Any, Literal, get_args

import numpy as np
import tensorflow as tf

from ddl.data.combining.random_access import RandomAccess, with_random_access
from ddl.data.decoded import DecodedSource
from ddl.data.source import IndexedSource, Source
from ddl.data.varying.lengths import examples_of, lengths_of
from ddl.data.varying.packing import packing
from ddl.errors import ConfigError, DataError, check_choice

TooLong = Literal["error", "cut", "split"]


def packed(
    data: Any,
    length: int,
    *,
    seed: int = 0,
    too_long: TooLong = "error",
    token_name: str = "token",
    length_name: str = "length",
) -> Source:
    """Packs documents of varying length into rows of one length, for language models.

    Each row holds whole documents one after the other, and padding at its end. The rows are
    decided once, from the lengths and `seed`, and are the same in each epoch; an epoch shuffles
    rows. So an epoch has a fixed number of rows, holds each document once, resumes anywhere at
    once, and several workers each read their own rows.

    Args:
      data: A source with random access whose examples have the features `token_name`, integers
        [most tokens], and `length_name`, an integer [], the number of tokens that count. Such as
        `ddl.data.token_lines`.
      length: Tokens of a row.
      seed: Seed of the choice among documents of the same length, and of their order in a row.
      too_long: Treatment of documents of more than `length` tokens: "error" refuses them, "cut"
        leaves out the tokens beyond, "split" makes several documents of them.
      token_name: Name of the feature with the tokens.
      length_name: Name of the feature with the number of tokens. All lengths are read once, unless
        the source has an attribute `lengths`.

    Returns:
      A source of rows with the features, each [length]: `token`, 0 for padding; `next_token`;
      `token_weight`, float32, 1 where `next_token` is of the same document and else 0; `segment`,
      int64, the number of the document in the row, from 1 on, and 0 for padding; `position`, int64,
      of the token in its document, from 0 on.

    Raises:
      ConfigError: If `length` is below 1, `seed` is negative or `too_long` is unknown.
      DataError: If a feature is missing, the data have further features, which a row could not
        hold, or are a stream; if all documents are empty; or if one is too long.
    """
    if length < 1 or seed < 0:
        raise ConfigError(
            f"packed.length must be at least 1 and packed.seed at least 0, got {length} and {seed}."
        )
    check_choice("packed.too_long", too_long, get_args(TooLong))
    source = with_random_access(data, "packed")
    lengths = lengths_of(source, length_name)
    spec = source.element_spec.get(token_name)
    if spec is None or spec.shape.rank != 1 or not spec.dtype.is_integer:
        raise DataError(
            f"packed needs the tokens as a feature {token_name!r}, integers [most tokens]; the "
            f"data have {', '.join(sorted(source.element_spec))}. Add it, or set packed.token_name."
        )
    if others := source.element_spec.keys() - {token_name, length_name}:
        raise DataError(
            f"packed takes data of {token_name!r} and {length_name!r} alone, since a row holds "
            f"several examples; the data also have {', '.join(sorted(others))}. Leave them out."
        )
    if lengths.max() > spec.shape[0]:
        raise DataError(
            f"Feature {length_name!r} must be at most {spec.shape[0]}, the size of {token_name!r}, "
            f"got {lengths.max()} in example {int(np.argmax(lengths))}. Correct it, or give each "
            "example all of its tokens."
        )
    if (longest := lengths.max()) > length and too_long == "error":
        raise DataError(
            f"packed.length is {length}, but {np.count_nonzero(lengths > length):,} of "
            f"{len(lengths):,} documents are longer, the longest of {longest:,} tokens, example "
            f"{int(np.argmax(lengths))}. Increase packed.length, or set packed.too_long to 'split' "
            "or 'cut'."
        )
    pieces = _pieces(lengths, length, too_long == "split")
    kind = _PackedExamples if isinstance(source, DecodedSource) else _PackedRows
    return kind(source, pieces, length, seed, token_name, length_name)


def _pieces(lengths: np.ndarray, most: int, split: bool) -> np.ndarray:
    """Returns the pieces of documents, int64 [4, pieces].

    For each piece its document, first token, length and the length of the document.
    """
    counts = -(-lengths // most) if split else np.minimum(lengths, 1)
    if not counts.sum():
        raise DataError(
            f"packed.data must have at least one document with tokens, got {len(lengths):,} of "
            "length 0. Correct the data, or packed.length_name, the feature of the lengths."
        )
    documents = np.repeat(np.arange(len(lengths)), counts)
    numbers = np.arange(len(documents)) - np.repeat(np.cumsum(counts) - counts, counts)
    first = numbers * most
    whole = lengths[documents]
    return np.stack([documents, first, np.minimum(whole - first, most), whole])


class _Rows:
    """The rows: reads their documents and joins them."""

    def __init__(
        self,
        source: RandomAccess,
        pieces: np.ndarray,
        length: int,
        seed: int,
        token_name: str,
        length_name: str,
    ):
        self.source = source
        self.length = length
        self._token_name = token_name
        self._length_name = length_name
        self._dtype = source.element_spec[token_name].dtype
        found = packing(pieces[2], length, seed)
        self.digest = zlib.crc32(found.first.tobytes(), zlib.crc32(found.documents.tobytes()))
        documents, begins, lengths, whole_lengths = pieces[:, found.documents]
        with tf.init_scope(), tf.device("CPU:0"):  # a graph captures eager tensors by reference
            self._first = tf.constant(found.first)
            self._documents, self._begins = tf.constant(documents), tf.constant(begins)
            self._lengths = tf.constant(lengths)
            self._whole_lengths = tf.constant(whole_lengths)

    def __len__(self) -> int:
        return len(self._first) - 1

    @property
    def element_spec(self) -> dict[str, tf.TensorSpec]:
        dtypes = {
            "token": self._dtype,
            "next_token": self._dtype,
            "token_weight": tf.float32,
            "segment": tf.int64,
            "position": tf.int64,
        }
        return {name: tf.TensorSpec([self.length], each, name) for name, each in dtypes.items()}

    @tf.autograph.experimental.do_not_convert
    def read(self, rows: tf.Tensor, seed: tf.Tensor | None = None) -> dict[str, tf.Tensor]:
        """Reads rows, int64 [b], in a graph of tf.data."""
        first = tf.gather(self._first, rows)
        counts = tf.gather(self._first, rows + 1) - first
        pieces = tf.ragged.range(first, first + counts).flat_values
        sizes = tf.gather(self._lengths, pieces)
        begins = tf.gather(self._begins, pieces)
        features = examples_of(self.source, tf.gather(self._documents, pieces), seed)
        now = tf.cast(features[self._length_name], tf.int64)
        is_same = tf.debugging.Assert(
            tf.reduce_all(now == tf.gather(self._whole_lengths, pieces)),
            ["The length of an example is not the one that was read first"],
        )
        with tf.control_dependencies([is_same]):
            tokens = tf.reshape(features[self._token_name], [-1])
        most = self.source.element_spec[self._token_name].shape[0]
        position = tf.ragged.range(sizes).flat_values
        begins += tf.range(tf.size(sizes, tf.int64)) * most
        tokens = tf.gather(tokens, tf.repeat(begins, sizes) + position)
        segment = tf.repeat(tf.ragged.range(counts).flat_values + 1, sizes)
        of_row = tf.repeat(tf.range(tf.size(counts)), counts)
        in_row = tf.math.segment_sum(sizes, of_row)
        token, segment, position = (
            tf.RaggedTensor.from_row_lengths(each, in_row, validate=False).to_tensor(
                shape=[rows.shape[0], self.length]
            )
            for each in (tokens, segment, position)
        )
        after = [[0, 0], [0, 1]]
        continues = (segment > 0) & (tf.pad(segment[:, 1:], after) == segment)
        next_token = tf.pad(token[:, 1:], after)
        return {
            "token": token,
            "next_token": tf.where(continues, next_token, tf.zeros([], token.dtype)),
            "token_weight": tf.cast(continues, tf.float32),
            "segment": segment,
            "position": position,
        }


class _PackedRows(IndexedSource):
    """Rows of a source that is looked up by many indices at once."""

    def __init__(self, *arguments: Any):
        self._rows = _Rows(*arguments)
        self.sources_read = [self._rows.source]
        self.packing_digest = self._rows.digest

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def element_spec(self) -> dict[str, tf.TensorSpec]:
        return self._rows.element_spec

    def gather(self, indices: tf.Tensor) -> dict[str, tf.Tensor]:
        return self._rows.read(indices)

    def damaged(self) -> str | None:
        return self._rows.source.damaged()


class _PackedExamples(DecodedSource):
    """Rows of a source that reads each example on its own."""

    def __init__(self, *arguments: Any):
        self._rows = _Rows(*arguments)
        self.sources_read = [self._rows.source]
        self.packing_digest = self._rows.digest

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def element_spec(self) -> dict[str, tf.TensorSpec]:
        return self._rows.element_spec

    def example(self, index: tf.Tensor, seed: tf.Tensor) -> dict[str, tf.Tensor]:
        rows = self._rows.read(index[tf.newaxis], seed[0])
        return {name: each[0] for name, each in rows.items()}

    def damaged(self) -> str | None:
        return self._rows.source.damaged()
