"""Files of fixed names, where somebody planted something else."""

import os

import pytest

from ddl.files import open_itself


def test_a_file_is_opened_as_it_is(tmp_path):
    for text in ("one", "two"):
        with open(tmp_path / "file", "a", opener=open_itself) as file:
            file.write(text)
    assert (tmp_path / "file").read_text() == "onetwo"
    assert open(tmp_path / "file", opener=open_itself).read() == "onetwo"  # noqa: SIM115


@pytest.mark.parametrize(
    ("plant", "message"),
    [
        (lambda at: at.symlink_to(at.with_name("other")), "it is a symbolic link"),
        (lambda at: at.symlink_to("missing"), "it is a symbolic link"),
        (lambda at: at.symlink_to("/dev/null"), "it is a symbolic link"),
        (os.mkfifo, "No such device or address"),  # nobody reads this pipe
    ],
    ids=["a link", "a link to nothing", "a link to a device", "a pipe"],
)
@pytest.mark.parametrize("mode", ["w", "a"])
def test_what_somebody_planted_is_refused(tmp_path, plant, message, mode):
    other = tmp_path / "other"
    other.write_text("theirs")
    plant(tmp_path / "file")
    with pytest.raises(OSError, match=message), open(tmp_path / "file", mode, opener=open_itself):
        pass
    assert other.read_text() == "theirs"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "other"]


def test_a_device_is_refused():
    with pytest.raises(OSError, match="not a regular file"):
        open("/dev/null", "w", opener=open_itself)  # noqa: SIM115
