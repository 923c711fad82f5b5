"""The directories of the sanity modes and those of real runs never mix."""

import pytest

from ddl.errors import ModelDirectoryError, NotReady
from ddl.run.directory import MARK, RunDirectory
from ddl.run.sanity.directory import SanityDirectory


@pytest.fixture
def marked(tmp_path):
    directory = SanityDirectory(str(tmp_path / "run"), "fast_run")
    directory.begin()
    yield directory
    directory.release()


@pytest.mark.parametrize("given", ["run", "run/", "run-fast_run", "run-fast_run/"])
def test_stands_beside_the_real_run(tmp_path, given):
    directory = SanityDirectory(f"{tmp_path}/{given}", "fast_run")
    assert directory.path == tmp_path / "run-fast_run"
    assert not list(tmp_path.iterdir())  # nothing before `begin`


def test_of_the_present_folder(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert SanityDirectory(".", "overfit_batch").path == tmp_path / "here-overfit_batch"


def test_no_real_run_takes_a_marked_directory(marked):
    with pytest.raises(
        ModelDirectoryError, match=r"was written by --fast_run, which is no real run. Pass another"
    ) as raised:
        RunDirectory(marked.path)
    assert f"such as {str(marked.path).removesuffix('-fast_run')}, or remove" in str(raised.value)
    (marked.path / MARK).write_text("")  # cut off
    with pytest.raises(ModelDirectoryError, match="is no real run"):
        RunDirectory(marked.path)


def test_a_real_run_is_never_touched(tmp_path):
    path = tmp_path / "run-fast_run"
    path.mkdir()
    SanityDirectory(str(path), "fast_run")  # empty
    (path / "metrics.jsonl").write_text("mine")
    with pytest.raises(ModelDirectoryError, match="holds other files. Move them away, or pass"):
        SanityDirectory(str(path), "fast_run")
    assert (path / "metrics.jsonl").read_text() == "mine"


def test_files_that_come_between_are_not_touched(tmp_path):
    directory = SanityDirectory(str(tmp_path / "run"), "fast_run")
    directory.path.mkdir()
    (directory.path / "metrics.jsonl").write_text("mine")
    with pytest.raises(ModelDirectoryError, match="holds other files"):
        directory.begin()
    assert (directory.path / "metrics.jsonl").read_text() == "mine"
    directory.release()


def test_a_directory_of_the_other_mode_is_refused(marked):
    (marked.path / MARK).write_text("overfit_batch\n")
    with pytest.raises(ModelDirectoryError, match="holds files of --overfit_batch"):
        SanityDirectory(str(marked.path), "fast_run")


def test_begins_anew_and_keeps_what_ddl_does_not_write(marked, tmp_path):
    for folder in ("checkpoints", "train", "eval", "export"):
        (marked.path / folder).mkdir()
        (marked.path / folder / "file").write_text("earlier")
    outside = tmp_path / "outside"
    outside.mkdir()
    for name in ("metrics.jsonl", "config.gin", "operative_config.gin", "notes.txt"):
        (marked.path / name).write_text("earlier")
    marked.begin()
    assert {path.name for path in marked.path.iterdir()} == {MARK, "notes.txt"}


def test_two_processes_do_not_write_at_once(marked, tmp_path):
    with pytest.raises(NotReady, match="another process is training there"):
        SanityDirectory(str(tmp_path / "run"), "fast_run").begin()
