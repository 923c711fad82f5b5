import pytest

from ddl.checkpoints.directory import write_atomically


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
