"""A path, a pattern or a list names files; what is missing is named."""

import pytest

from ddl.data.readers.paths import found_files
from ddl.errors import DataError


def made(folder, *names):
    for name in names:
        (folder / name).write_bytes(b"")
    return [str(folder / name) for name in names]


def test_a_pattern_gives_its_files_in_the_order_of_their_names(tmp_path):
    files = made(tmp_path, "b", "a", "c")
    assert found_files(str(tmp_path / "*"), "x.files") == sorted(files)
    assert found_files(tmp_path / "b", "x.files") == files[:1]
    assert found_files([files[2], tmp_path / "[ab]"], "x.files") == [files[2], files[1], files[0]]


def test_a_file_whose_name_has_the_letters_of_a_pattern_is_read(tmp_path):
    (file,) = made(tmp_path, "a[1]")
    assert found_files(file, "x.files") == [file]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ("none-*", r"x\.files must name existing files .*none-\*.*we are in"),
        (".", "is a folder: add"),
        (["a", "b", "../in/a"], r"each file once, got .*/in/a 2 times"),
        ([], r"at least one file"),
        ("gs://bucket/a", "files of this machine"),
    ],
)
def test_files_that_are_missing_or_doubled_are_named(tmp_path, monkeypatch, files, message):
    folder = tmp_path / "in"
    folder.mkdir()
    made(folder, "a", "b")
    monkeypatch.chdir(folder)
    with pytest.raises(DataError, match=message):
        found_files(files, "x.files")


def test_a_pattern_misses_no_shard_that_it_matches(tmp_path):
    shards = made(tmp_path, *(f"train-{number:05d}-of-00004.rec" for number in (0, 1, 3)))
    with pytest.raises(DataError, match=r"1 of 00004 are missing, such as .*train-00002-of-00004"):
        found_files(str(tmp_path / "train-*"), "x.files")
    assert found_files(str(tmp_path / "train-0000[01]-*"), "x.files") == shards[:2]
    assert found_files(shards, "x.files") == shards
    made(tmp_path, "train-00002-of-00004.rec", "train-00000-of-00001.rec")
    with pytest.raises(DataError, match="sets of 00001 and 00004 shards"):
        found_files(str(tmp_path / "train-*"), "x.files")
    from_1 = made(tmp_path, "t-1-of-2", "t-2-of-2")
    assert found_files(str(tmp_path / "t-*"), "x.files") == from_1
