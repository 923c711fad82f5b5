import pytest

from ddl.checkpoints.directory import write_atomically


def test_a_planted_link_is_not_followed(tmp_path):
    other = tmp_path / "other"
    other.write_text("theirs")
    (tmp_path / "file.partial").symlink_to(other)
    write_atomically(tmp_path / "file", "ours")
    assert other.read_text() == "theirs"
    assert (tmp_path / "file").read_text() == "ours"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "other"]


def test_a_failure_leaves_the_old_content_and_no_partial_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_atomically(path, "one")

    def fails(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fails)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, "two")
    assert path.read_text() == "one"
    assert list(tmp_path.iterdir()) == [path]
