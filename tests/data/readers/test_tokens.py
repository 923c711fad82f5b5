import numpy as np
import pytest

from ddl.data.readers.tokens import packed, token_lines, tokens
from ddl.errors import ConfigError, DataError

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


def test_tokens_of_a_tokenizer(tmp_path):
    numbers = np.array([5, 60_000, 7, 8], np.uint16)
    numbers.tofile(tmp_path / "t.bin")
    binary = tokens(tmp_path / "t.bin", 3, dtype="uint16")
    for source in (binary, tokens(numbers, 3)):
        assert all_rows(source)["token"].tolist() == [[5, 60_000, 7]]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda folder: tokens(folder / "t", 0), ConfigError, "tokens.length must be at least 1"),
        (lambda folder: tokens(folder / "t", 3, dtype="int8"), ConfigError, "tokens.dtype must be"),
        (lambda folder: tokens(folder / "t", 3, dtype="int32"), DataError, "5 bytes, .* of int32"),
        (
            lambda folder: tokens(folder / "t", 5),
            DataError,
            "tokens.length is 5, but the longest text has 5",
        ),
        (lambda folder: tokens(folder / "absent", 5), DataError, "matches .*absent"),
        (lambda folder: tokens(folder / "t.gz", 5), DataError, "t.gz must be plain .*Decompress"),
        (lambda folder: tokens(folder / "f.npy", 1), DataError, "f.npy must be .*np.load"),
        (lambda folder: tokens(np.zeros([2, 2], int), 1), DataError, r"int64 \(2, 2\)"),
        (lambda folder: tokens(np.zeros(9, np.uint64), 1), DataError, "of int64, got uint64"),
    ],
)
def test_texts_that_are_refused(tmp_path, call, error, message):
    (tmp_path / "t").write_bytes(b"abcde")
    (tmp_path / "t.gz").write_bytes(b"abcde")
    np.save(tmp_path / "f.npy", np.zeros(9))
    with pytest.raises(error, match=message):
        call(tmp_path)


def test_lines_are_documents(tmp_path):
    (tmp_path / "a").write_bytes(b"abc\n\nd\r\n\r\n")
    (tmp_path / "b").write_bytes(b"ef")
    lines = token_lines([tmp_path / "a", tmp_path / "b"])
    assert [bytes(line) for line in lines] == [b"abc", b"d", b"ef"]
    encoded = token_lines(tmp_path / "a", lambda texts: [[len(text), 300] for text in texts])
    assert [line.tolist() for line in encoded] == [[3, 300], [1, 300]]
    assert packed(encoded, 4).files == (str(tmp_path / "a"),)
    with pytest.raises(ConfigError, match="must return 2 lists of tokens, got 1"):
        token_lines(tmp_path / "a", lambda texts: [[1]])
    with pytest.raises(DataError, match="Line 0 must be .* float64"):
        token_lines(tmp_path / "a", lambda texts: [[0.5]] * 2)


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


def test_the_longest_document_of_a_row_is_not_always_its_first():
    rows = all_rows(packed(SEQUENCES, LENGTH))
    assert any((one == 1).sum() < max(np.bincount(one)[1:]) for one in rows["segment"])


def test_the_digest_tells_whether_other_documents_share_rows():
    one, same = packed(SEQUENCES, LENGTH), packed(SEQUENCES, LENGTH)
    assert one.items.digest == same.items.digest
    # Fixed for all versions of NumPy, so that a run is resumed after an upgrade.
    assert packed([[1], [2, 2], [3]], 3).items.digest == 1081925794
    for other in (packed(SEQUENCES, LENGTH, seed=1), packed(SEQUENCES[1:], LENGTH)):
        assert other.items.digest != one.items.digest


def test_long_documents_are_refused_cut_or_split():
    with pytest.raises(DataError, match=r"has 12 tokens, but packed.length is 5"):
        packed(SEQUENCES, 5)
    cut = documents_in(all_rows(packed(SEQUENCES, 5, too_long="cut")))
    assert sorted(cut) == sorted(tokens[:5] for tokens in SEQUENCES)
    split = documents_in(all_rows(packed(SEQUENCES, 5, too_long="split")))
    assert sorted(split) == sorted(s[n : n + 5] for s in SEQUENCES for n in range(0, len(s), 5))


def test_a_row_for_each_document():
    rows = all_rows(packed(SEQUENCES, LENGTH, alone=True))
    assert documents_in(rows) == SEQUENCES
    assert rows["segment"].max() == 1


def test_documents_may_be_arrays_and_empty_ones_are_left_out():
    sequences = [np.array([5, 6], np.uint8), [], np.array([7], np.int32)]
    assert sorted(documents_in(all_rows(packed(sequences, 4)))) == [[5, 6], [7]]


@pytest.mark.parametrize(
    ("sequences", "arguments", "error", "message"),
    [
        (SEQUENCES, {"length": 0}, ConfigError, "packed.length must be at least 1, got 0"),
        (SEQUENCES, {"too_long": "drop"}, ConfigError, "packed.too_long must be 'error', 'cut'"),
        ([[], []], {}, DataError, "at least one document with tokens"),
        ([[1], "text"], {}, DataError, r"packed.sequences\[1\] must be integers"),
        ([[1], [0.5]], {}, DataError, r"packed.sequences\[1\] must be .* got float64"),
        ([[2**63]], {}, DataError, "of int64, got uint64"),
    ],
)
def test_documents_that_are_refused(sequences, arguments, error, message):
    with pytest.raises(error, match=message):
        packed(sequences, **{"length": LENGTH, **arguments})
