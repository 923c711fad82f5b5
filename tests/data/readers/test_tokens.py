import numpy as np
import pytest

from ddl.data.readers.tokens import packed, tokens
from ddl.errors import DataError

LENGTH = 16
RANDOM = np.random.default_rng(0)
LENGTHS = RANDOM.integers(1, 13, 41)
SEQUENCES = [(1 + 100 * number + np.arange(n)).tolist() for number, n in enumerate(LENGTHS)]


def all_rows(source):
    return source.rows(np.arange(len(source)))


def test_every_token_but_the_first_of_a_file_is_predicted_once(tmp_path):
    (tmp_path / "a").write_bytes(b"abcdefgh")
    (tmp_path / "b").write_bytes(b"vwxyz")
    (tmp_path / "empty").write_bytes(b"")
    paths = [str(tmp_path / name) for name in ("a", "empty", "b")]
    source = tokens(paths, 3)
    rows = all_rows(source)
    assert [bytes(row.tolist()) for row in rows["token"]] == [b"abc", b"def", b"vwx"]
    assert [bytes(row.tolist()) for row in rows["next_token"]] == [b"bcd", b"efg", b"wxy"]
    spec = source.element_spec["next_token"]
    assert (spec.shape, spec.dtype, source.files) == ((3,), "int64", tuple(paths))
    some = source.rows(np.array([2, 0]))
    np.testing.assert_array_equal(some["token"], rows["token"][[2, 0]])


def test_texts_that_are_refused(tmp_path):
    (tmp_path / "t").write_bytes(b"abcde")
    with pytest.raises(DataError, match="5 bytes, .* of int32"):
        tokens(tmp_path / "t", 3, dtype="int32")
    with pytest.raises(DataError, match="tokens.length, 5, must be below that of any text, 5"):
        tokens(tmp_path / "t", 5)


def documents_in(rows):
    """Returns the documents of rows after checking the features against each other."""
    found = []
    for row in range(len(rows["token"])):
        one = {name: values[row] for name, values in rows.items()}
        used = (one["segment"] > 0).sum()
        assert not one["token"][used:].any()
        assert not one["token_weight"][used:].any()
        assert (np.diff(one["segment"][:used]) >= 0).all()
        for number in range(1, one["segment"].max() + 1):
            own = one["segment"] == number
            document = one["token"][own].tolist()
            assert one["position"][own].tolist() == list(range(len(document)))
            assert one["next_token"][own].tolist() == [*document[1:], 0]
            assert one["token_weight"][own].tolist() == [1] * (len(document) - 1) + [0]
            found.append(document)
    return found


def test_packed_rows_hold_each_document_once():
    source = packed(SEQUENCES, LENGTH)
    rows = all_rows(source)
    assert sorted(documents_in(rows)) == sorted(SEQUENCES)
    some = source.rows(np.array([3, 1]))
    assert all((some[name] == rows[name][[3, 1]]).all() for name in rows)
