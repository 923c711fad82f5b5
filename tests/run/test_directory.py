import os

import pytest

from ddl.errors import ModelDirectoryError, NotReady
from ddl.run.directory import RunDirectory


def test_nothing_is_created_before_open(tmp_path):
    directory = RunDirectory(tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []
    directory.open()
    assert directory.path.is_dir()


def test_configs_are_written_and_read_back(tmp_path):
    directory = RunDirectory(tmp_path)
    assert directory.saved_config() is None
    directory.write_configs("SEED = 1\n", "SEED = 1\nX.y = 2\n")
    assert directory.saved_config() == "SEED = 1\nX.y = 2\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "config.gin",
        "operative_config.gin",
    ]


def test_a_file_in_the_way(tmp_path):
    file = tmp_path / "file"
    file.write_text("mine")
    for path in (file, file / "below"):
        with pytest.raises(ModelDirectoryError, match="is a file, not a directory"):
            RunDirectory(path)
    assert file.read_text() == "mine"


def test_a_remote_path_is_not_taken_for_a_local_one():
    with pytest.raises(
        ModelDirectoryError, match="must be a local path, got the URL gs://bucket/run"
    ):
        RunDirectory("gs://bucket/run")


def test_a_directory_that_cannot_be_written():
    # Not even root can make a directory in the kernel's process table.
    with pytest.raises(ModelDirectoryError, match="cannot be"):
        RunDirectory("/proc/run").open()


def test_a_directory_that_cannot_be_reached(tmp_path, monkeypatch):
    with pytest.raises(ModelDirectoryError, match="cannot be reached: File name too long. Change"):
        RunDirectory(tmp_path / ("x" * 300))
    directory = RunDirectory(tmp_path)

    def denied(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", denied)
    with pytest.raises(ModelDirectoryError, match="cannot be reached: Permission denied"):
        directory.claim()


@pytest.mark.parametrize("exists", [True, False])
def test_two_runs_in_one_directory_are_refused(tmp_path, exists):
    path = tmp_path if exists else tmp_path / "new"
    first, second = RunDirectory(path), RunDirectory(path)
    first.claim()
    first.open()
    with pytest.raises(NotReady, match="another process is training there. Wait") as refused:
        second.claim()
    assert refused.value.exit_status == 70  # 1 would tell a cluster not to start it again
    first.release()
    second.claim()
    second.release()
    assert list(path.iterdir()) == []


def test_a_config_that_cannot_be_read_is_named(tmp_path):
    directory = RunDirectory(tmp_path)
    directory.operative_config.write_bytes(b"SEED = 1\n\xff\xfe\0")
    with pytest.raises(ModelDirectoryError, match=r"config.gin cannot be read: .*utf-8.*Restore"):
        directory.saved_config()
    directory.operative_config.unlink()
    directory.operative_config.mkdir()
    with pytest.raises(ModelDirectoryError, match=r"config.gin cannot be read: .*Is a directory"):
        directory.saved_config()
