import gzip

import numpy as np
import pytest
import tensorflow as tf
from ddl.data.formats import text, text_lines, token_windows

from ddl.errors import ConfigError, DataError
from tests.data.test_records import taken


@pytest.mark.parametrize("chunk", [1, 3, 1 << 24])
def test_lines(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(text, "_CHUNK", chunk)
    (tmp_path / "a").write_bytes("one\n\ntwo \r\nthrée\n\r\n".encode())
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "b").write_bytes(b"\n\nlast")
    source = text_lines([str(tmp_path / name) for name in ("a", "empty", "b")])
    (batch,) = taken(source, 1, batch=4, shuffle=False)
    assert [line.decode() for line in batch["text"]] == ["one", "two ", "thrée", "last"]


def test_lines_as_numbers(tmp_path):
    (tmp_path / "a").write_text("abc\nd\n")

    def encode(lines):
        padded = [[*line, 0, 0, 0][:3] for line in lines]
        return {"token": np.array(padded), "length": np.array([len(line) for line in lines])}

    source = text_lines(str(tmp_path / "a"), encode=encode)
    (batch,) = taken(source, 1, batch=2, shuffle=False)
    assert batch["token"].tolist() == [[97, 98, 99], [100, 0, 0]]
    assert batch["length"].tolist() == [3, 1]


def test_windows(tmp_path):
    (tmp_path / "a").write_bytes(bytes(range(8)))  # 2 windows of 3, and one token too many
    np.array([], np.uint8).tofile(tmp_path / "empty")
    (tmp_path / "b").write_bytes(bytes(range(10, 14)))
    source = token_windows([str(tmp_path / name) for name in ("a", "empty", "b")], 3)
    (batch,) = taken(source, 1, batch=3, shuffle=False)
    assert batch["token"].tolist() == [[0, 1, 2], [3, 4, 5], [10, 11, 12]]
    assert batch["next_token"].tolist() == [[1, 2, 3], [4, 5, 6], [11, 12, 13]]
    assert batch["token"].dtype == np.int64


@pytest.mark.parametrize("dtype", ["uint16", "int32", "int64"])
def test_windows_of_numbers(tmp_path, dtype):
    tokens = np.arange(7).astype(dtype) * 5
    tokens.tofile(tmp_path / "tokens.bin")
    np.save(tmp_path / "tokens.npy", tokens)
    for name in ("tokens.bin", "tokens.npy"):
        source = token_windows(str(tmp_path / name), 2, dtype=dtype)
        (batch,) = taken(source, 1, batch=3, shuffle=False)
        assert batch["next_token"].tolist() == [[5, 10], [15, 20], [25, 30]]


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32", "int64"])
def test_windows_of_one_file_are_gathered_in_it_as_python_looks_them_up(tmp_path, dtype):
    tokens = np.random.default_rng(0).integers(0, 100, 64).astype(dtype)  # 9 windows, the last full
    tokens.tofile(tmp_path / "a")
    source = token_windows(str(tmp_path / "a"), 7, dtype=dtype)
    expected = source._lookup(np.arange(9))
    source._lookup = None
    (batch,) = taken(source, 1, batch=9, shuffle=False)
    for name, windows in expected.items():
        assert batch[name].dtype == np.int64
        np.testing.assert_array_equal(batch[name], windows)


def test_bad_input(tmp_path):
    (tmp_path / "blank").write_text("\n\r\n\n")
    (tmp_path / "short").write_bytes(b"abc")
    np.save(tmp_path / "floats.npy", np.zeros(9))
    short = str(tmp_path / "short")
    for call, error, message in [
        (lambda: text_lines(str(tmp_path / "absent")), DataError, "absent could not be read"),
        (lambda: text_lines([]), DataError, "text_lines.files is empty"),
        (
            lambda: text_lines(str(tmp_path / "blank")),
            DataError,
            "got 1 files without .*blank.*Pass",
        ),
        (lambda: token_windows(short, 3), DataError, "the 4 tokens .* the longest has 3"),
        (lambda: token_windows(short, 0), ConfigError, "at least 1, got 0"),
        (lambda: token_windows(short, 1, dtype="float32"), ConfigError, "'float32'"),
        (lambda: token_windows(short, 1, dtype="uint16"), DataError, "3 bytes, .* no whole number"),
        (lambda: token_windows(str(tmp_path / "floats.npy"), 2), DataError, r"integers \[n\], got"),
    ]:
        with pytest.raises(error, match=message):
            call()


def test_tokens_beyond_int64_are_named(tmp_path):
    """They became negative, or those of two dtypes numbers of float64."""
    np.save(tmp_path / "a.npy", np.array([1, 2, 3, 2**63 + 5, 7], np.uint64))
    np.save(tmp_path / "b.npy", np.array([2**60 + 1, 2, 3]))
    np.save(tmp_path / "c.npy", np.array([7, 8, 9], np.uint64))
    source = token_windows([str(tmp_path / f"{name}.npy") for name in "abc"], 2)
    read = tf.function(source.gather)
    tokens = read(tf.constant([2, 3], tf.int64))["token"]
    assert tokens.numpy().tolist() == [[2**60 + 1, 2], [7, 8]]
    message = r"Token number 3 of .*a\.npy must be at most 92.* got 922"
    with pytest.raises(tf.errors.OpError, match=message):
        read(tf.constant([0, 1], tf.int64))


def test_a_text_that_is_listed_twice(tmp_path):
    (tmp_path / "a").write_text("abc\n")
    for read in (text_lines, lambda files: token_windows(files, 2)):
        with pytest.raises(
            DataError, match=r"files must list each file once, got .*/a twice\. Rem"
        ):
            read([str(tmp_path / "a")] * 2)


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("t.txt", text_lines),  # by its first bytes
        ("t.txt.gz", text_lines),
        ("t.txt", lambda files: token_windows(files, 2)),
        ("t.bin.gz", lambda files: token_windows(files, 2, dtype="uint16")),
    ],
)
def test_a_compressed_file_among_others_is_named(tmp_path, name, read):
    (tmp_path / "plain.txt").write_text("one\ntwo\n")
    content = gzip.compress(b"one\ntwo\n")
    (tmp_path / name).write_bytes(content + b"\0" * (len(content) % 2))
    message = rf"/{name} must not be compressed.*got a \.gz file\. Decompress it"
    with pytest.raises(DataError, match=message):
        read([str(tmp_path / "plain.txt"), str(tmp_path / name)])


def test_wide_tokens_may_begin_as_a_compressed_file_does(tmp_path):
    tokens = np.frombuffer(gzip.compress(b"one")[:8], np.uint16)
    tokens.tofile(tmp_path / "tokens.bin")
    (batch,) = taken(token_windows(str(tmp_path / "tokens.bin"), 3, dtype="uint16"), 1, batch=1)
    assert batch["token"].tolist() == [tokens[:3].tolist()]


def test_batches_that_are_looked_up_together_are_those_of_one_look_up_each(tmp_path):
    """From any batch on, by rows, and over the end of an epoch."""
    (tmp_path / "a").write_text("".join(f"line {n}\n" for n in range(40)))
    for source in (text_lines(str(tmp_path / "a")), token_windows(str(tmp_path / "a"), 5)):
        assert source.reads_ahead
        together = taken(source, 20, batch=7)
        later = taken(source, 3, first=9, batch=7, rows=np.array([6, 1]))
        source.reads_ahead = False
        for batch, alone in zip(together, taken(source, 20, batch=7), strict=True):
            for name in alone:
                np.testing.assert_array_equal(batch[name], alone[name], err_msg=name)
        for part, whole in zip(later, together[9:], strict=False):
            for name in part:
                np.testing.assert_array_equal(part[name], whole[name][[6, 1]], err_msg=name)
