"""Packed rows: their documents, segments, positions and weights; the order; errors."""

import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.errors import ConfigError, DataError
from tests.data.varying.documents import COUNT, LENGTHS, TOKENS, Decoded, an_epoch, arrays, lines

LENGTH = 16


def documents_in(batches):
    """Returns the documents of all rows of weight 1, after checking each row."""
    found = []
    for batch in batches:
        for row in range(len(batch["token"])):
            one = {name: values[row] for name, values in batch.items()}
            if not one["weight"]:
                continue
            count = one["segment"].max()
            used = (one["segment"] > 0).sum()
            assert (one["token"][used:] == 0).all()
            assert (one["token_weight"][used:] == 0).all()
            assert (np.diff(one["segment"][:used]) >= 0).all()
            for number in range(1, count + 1):
                own = one["segment"] == number
                tokens = one["token"][own].tolist()
                np.testing.assert_array_equal(one["position"][own], range(len(tokens)))
                assert one["next_token"][own].tolist() == [*tokens[1:], 0]
                assert one["token_weight"][own].tolist() == [1.0] * (len(tokens) - 1) + [0.0]
                found.append(tokens)
    return found


EXPECTED = sorted(row[:length].tolist() for row, length in zip(TOKENS, LENGTHS, strict=True))


@pytest.fixture(params=["arrays", "examples", "lines"])
def source(request, tmp_path):
    return {"arrays": arrays, "examples": Decoded, "lines": lambda: lines(tmp_path)}[
        request.param
    ]()


def test_each_document_once_an_epoch(source):
    rows = ddl.data.packed(source, LENGTH)
    assert len(rows) < COUNT
    first, second = an_epoch(rows, 4), an_epoch(rows, 4, epoch=1)
    assert sorted(documents_in(first)) == EXPECTED
    assert sorted(documents_in(second)) == EXPECTED
    assert documents_in(first) != documents_in(second)
    spec = rows.element_spec
    assert {name: (each.shape, each.dtype) for name, each in first[0].items()} == {
        **{name: ((4, *each.shape), each.dtype.as_numpy_dtype) for name, each in spec.items()},
        "weight": ((4,), np.float32),
    }


def test_all_kinds_of_sources_give_the_same_rows(tmp_path):
    batches = [
        an_epoch(ddl.data.packed(each, LENGTH), 4)
        for each in (arrays(), Decoded(), lines(tmp_path))
    ]
    for one, *others in zip(*batches, strict=True):
        for other in others:
            tf.nest.map_structure(np.testing.assert_array_equal, one, other)


def test_any_batch_and_any_rows_of_it_alone(source):
    rows = ddl.data.packed(source, LENGTH)
    whole = an_epoch(rows, 4)
    later = next(
        rows.batches(4, 2, seed=3, shuffle=True, rows=np.array([3, 1])).as_numpy_iterator()
    )
    for name, values in later.items():
        np.testing.assert_array_equal(values, whole[2][name][[3, 1]])


def test_another_seed_packs_otherwise():
    one, other = (
        an_epoch(ddl.data.packed(arrays(), LENGTH, seed=seed), 4, shuffle=False) for seed in (0, 1)
    )
    assert sorted(documents_in(one)) == sorted(documents_in(other))
    assert documents_in(one) != documents_in(other)


def test_long_documents():
    with pytest.raises(DataError, match=r"length is 5, but \d+ of 41 documents are longer, the lo"):
        ddl.data.packed(arrays(), 5)
    cut = documents_in(an_epoch(ddl.data.packed(arrays(), 5, too_long="cut"), 4))
    assert sorted(cut) == sorted(tokens[:5] for tokens in EXPECTED)
    split = documents_in(an_epoch(ddl.data.packed(arrays(), 5, too_long="split"), 4))
    pieces = [tokens[n : n + 5] for tokens in EXPECTED for n in range(0, len(tokens), 5)]
    assert sorted(split) == sorted(pieces)


def test_empty_documents_are_left_out():
    source = ddl.data.ArraySource(token=TOKENS[:3], length=np.array([2, 0, 1]))
    found = documents_in(an_epoch(ddl.data.packed(source, LENGTH), 1))
    assert sorted(found) == [TOKENS[0, :2].tolist(), TOKENS[2, :1].tolist()]


@pytest.mark.parametrize("lengths", [LENGTHS[:8], LENGTHS.astype("f4"), LENGTHS[:, np.newaxis]])
def test_lengths_of_other_examples(lengths):
    source = arrays()
    source.lengths = lengths
    with pytest.raises(DataError, match="ArraySource must hold one integer for each of its 41"):
        ddl.data.packed(source, LENGTH)


class Changed(Decoded):
    lengths = LENGTHS - (np.arange(COUNT) == np.argmax(LENGTHS))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: ddl.data.packed(arrays(), 0), ConfigError, "length must be at least 1"),
        (lambda: ddl.data.packed(arrays(), 16, seed=-1), ConfigError, "seed at least 0"),
        (lambda: ddl.data.packed(arrays(), 16, too_long="drop"), ConfigError, "too_long must be"),
        (
            lambda: ddl.data.packed(arrays(), 16, length_name="size"),
            DataError,
            "length of each example as a feature 'size'",
        ),
        (
            lambda: ddl.data.packed(arrays(), 16, token_name="word"),
            DataError,
            "the tokens as a feature 'word'",
        ),
        (
            lambda: ddl.data.packed(arrays(label=LENGTHS), 16),
            DataError,
            "alone, since a row holds several examples; the data also have label",
        ),
        (
            lambda: ddl.data.packed({"token": TOKENS, "length": LENGTHS - 5}, 16),
            DataError,
            "'length' must be at least 0",
        ),
        (
            lambda: ddl.data.packed({"token": TOKENS, "length": LENGTHS + 5}, 32),
            DataError,
            "must be at most 12, the size of 'token'",
        ),
        (
            lambda: ddl.data.packed({"token": TOKENS, "length": LENGTHS * 0}, 32),
            DataError,
            "packed.data must .* got 41 of length 0. Correct the data",
        ),
    ],
)
def test_refusals(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_a_document_whose_length_has_changed():
    source = ddl.data.packed(Changed(), LENGTH)
    with pytest.raises(tf.errors.InvalidArgumentError, match="not the one that was read first"):
        an_epoch(source, 4)


def test_lines_of_bytes(tmp_path):
    (tmp_path / "a").write_bytes(b"abc\n\nd\r\n")
    (tmp_path / "b").write_bytes(b"ef")
    source = ddl.data.token_lines([str(tmp_path / "a"), str(tmp_path / "b")])
    assert source.lengths.tolist() == [3, 1, 2]
    (batch,) = an_epoch(source, 3, shuffle=False)
    assert batch["token"].tolist() == [[97, 98, 99], [100, 0, 0], [101, 102, 0]]
    assert batch["length"].tolist() == [3, 1, 2]
    with pytest.raises(ConfigError, match="a list of tokens for each of the 3 lines, got 1 lists"):
        ddl.data.token_lines([str(tmp_path / "a"), str(tmp_path / "b")], encode=lambda lines: [[1]])
    (tmp_path / "c").write_text("\n")
    with pytest.raises(DataError, match="token_lines.files .* got 1 files without any.* Pass"):
        ddl.data.token_lines(str(tmp_path / "c"))
