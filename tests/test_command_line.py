import pytest
from absl import flags

from ddl.command_line import asks_for_help, parse, with_aliases


def test_aliases_keep_their_order():
    assert with_aliases(
        ["ddl", "--gin_param=A = 1", "--gin.B=2", "-gin.train/C.d='x=y'", "--ginger=1"]
    ) == [
        "ddl",
        "--gin_param=A = 1",
        "--gin_param=B=2",
        "--gin_param=train/C.d='x=y'",
        "--ginger=1",
    ]


def test_what_is_no_flag_is_an_error():
    values = flags.FlagValues()
    flags.DEFINE_integer("steps", 1, "", flag_values=values)
    parse(values, ["ddl", "--steps=3"])
    assert values.steps == 3
    with pytest.raises(flags.Error, match="'steps=4' is not a flag; flags begin with --"):
        parse(values, ["ddl", "steps=4"])


def test_asking_for_help():
    assert asks_for_help(["ddl", "--gin_file=a.gin", "-h"])
    assert not asks_for_help(["ddl", "--gin_file=--help"])
