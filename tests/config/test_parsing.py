"""Reading files: where they are found, and what cannot be read."""

import os

import pytest

from ddl import config
from ddl.config import registry
from ddl.config.parsing import PACKAGE_FOLDER
from tests.config.dummies import complaint


def test_later_files_and_params_override(write):
    one = write("RATE = 1.0\nTrial.rate = %RATE\nTrial.steps = 1")
    two = write("Trial.steps = 2", "other.gin")
    config.load([one, two], ["RATE = 3.0"])
    values = config.build("Trial").values
    assert (values["steps"], values["rate"]) == (2, 3.0)
    config.check_all_used()
    config.load([one])
    assert config.build("Trial").values["steps"] == 1


def test_include_is_found_beside_the_includer_then_on_the_search_path(write):
    write("Trial.steps = 5", "deep/other.gin")
    write("Trial.rate = 6.0", "library/shared.gin")
    run = write("include 'other.gin'\ninclude 'shared.gin'", "deep/run.gin")
    config.load([run], search_path=["library"])
    values = config.build("Trial").values
    assert (values["steps"], values["rate"]) == (5, 6.0)


def test_the_package_folder_is_searched():
    assert os.path.dirname(os.path.dirname(registry.__file__)) == PACKAGE_FOLDER


def test_missing_file(write):
    write("", "configs/digits_cnn.gin")
    message = complaint(config.load, ["configs/digit_cnn.gin"])
    assert "no config file configs/digit_cnn.gin. Did you mean digits_cnn.gin?" in message
    assert "Searched in: configs" in message


def test_a_folder_and_a_list_are_no_file(write):
    run = write("", "experiments/run.gin")
    message = complaint(config.load, ["experiments"])
    assert f"There is a folder of this name. Name a file in it, such as {run}." in message
    message = complaint(config.load, [f"{run},other.gin"])
    assert f"Pass one flag for each file: --gin_file={run} --gin_file=other.gin." in message


def test_a_pipe_is_no_file(write):
    run = write("")
    os.remove(run)
    os.mkfifo(run)
    message = complaint(config.load, [run])
    assert "There is a pipe or device of this name, but a config must be a regular file" in message


def test_a_byte_order_mark_is_no_character(write, tmp_path):
    (tmp_path / "run.gin").write_bytes(b"\xef\xbb\xbfTrial.steps = 3")
    config.load(["run.gin"])
    assert config.build("Trial").values["steps"] == 3


def test_missing_include(write):
    write("", "deep/other.gin")
    run = write("\ninclude 'othre.gin'", "deep/run.gin")
    message = complaint(config.load, [run])
    assert message.startswith("deep/run.gin:2: There is no config file othre.gin.")
    assert "Did you mean other.gin?" in message


def test_unreadable_file(write, tmp_path):
    (tmp_path / "run.gin").write_bytes(b"A = '\xff'")
    assert "Cannot read the config file run.gin" in complaint(config.load, ["run.gin"])


def test_files_that_include_one_another(write):
    write("include 'run.gin'", "other.gin")
    message = complaint(config.load, [write("include 'other.gin'")])
    assert message.startswith("other.gin:1: run.gin includes itself, directly or")


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("A = 1\nMODE = train", 2, "train is not a value. Write 'train' for a string"),
        ("RATE = 1/3", 1, "Expected newline. gin evaluates no expressions. Write the result."),
        ("RATE = -1 + 3  # two", 1, "gin evaluates no expressions"),
        ("A = true", 1, "true is not a value. Write True."),
        ("A = null", 1, "null is not a value. Write None."),
        ("A = 0,05", 1, "Write 0.05 for a number, or (0, 5) for two."),
        ("A = 5; B = 3", 1, "Remove the ;. Each binding has a line of its own."),
        ("A: 5", 1, "Write NAME = value."),
        ("= 5", 1, "Write NAME = value."),
        ("include 'other.gin';", 1, "Remove the ;. Each binding has a line of its own."),
        ("A = 1 000", 1, "Write 1000, without spaces."),
        (
            "A =\u00a05",
            1,
            "Column 4 has the character no-break space (U+00A0). Replace it by a space",
        ),
        ("A = \u201ca\u201d", 1, "Column 5 has the character left double quotation mark (U+201C)"),
        ("A = '\u00e9\u00a0' = 3", 1, "Cannot parse"),  # inside a text any character is right
        ("Trial.rate", 1, "Expected NAME = value"),
        ("A =\nB = 1", 1, "Unable to parse value. Write a value after the =."),
        ("A = 1\nB = (1, 2\nC = 3\n", 3, ""),
        ("A = (1,\n", 1, "never closed"),
        ("Trial . rate = 3", 1, "Malformatted scope or selector"),
        ("from __gin__ import dynamic_registration", 1, "Cannot import __gin__"),
        ("A = 1\nB = {[]: 1}", 2, "unhashable"),
        ("A = 1\nB = " + 5000 * "[" + 5000 * "]", 2, "recursion"),
    ],
)
def test_what_cannot_be_parsed(load, text, line, words):
    message = complaint(load, text)
    assert message.startswith(f"run.gin:{line}: ")
    assert words in message


def test_a_param_is_shown_as_typed(load):
    message = complaint(load, "", "RATE = fast")
    assert message.startswith("--gin_param 'RATE = fast': fast is not a value.")
