import pytest
from absl import flags

from ddl.cli.arguments import asks_for_help, parse, with_aliases


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
    with pytest.raises(flags.Error, match="'steps=4' is not a flag. Flags begin with --"):
        parse(values, ["ddl", "steps=4"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps=3", "--steps=4"], "--steps=4: already defined as 3. Pass this flag once"),
        (["--steps=3", "--steps", "4"], "--steps=4: already defined as 3"),
        (["--name=a", "--name=b"], "--name=b: already defined as a"),
        (["--names=3", "--names=4"], r"--names=4: already defined as \['3'\]"),
        (["--fast", "--nofast"], "--fast=false: already defined as True"),
    ],
)
def test_a_flag_with_one_value_is_given_once(arguments, message):
    values = flags.FlagValues()
    flags.DEFINE_integer("steps", 1, "", flag_values=values)
    flags.DEFINE_string("name", None, "", flag_values=values)
    flags.DEFINE_list("names", [], "", flag_values=values)
    flags.DEFINE_bool("fast", False, "", flag_values=values)
    with pytest.raises(flags.Error, match=message):
        parse(values, ["ddl", *arguments])


def test_a_flag_with_several_values_is_given_as_often_as_wanted():
    values = flags.FlagValues()
    flags.DEFINE_multi_string("gin_file", None, "", flag_values=values)
    flags.DEFINE_alias("gin_files", "gin_file", flag_values=values)
    parse(values, ["ddl", "--gin_file=a", "--gin_files=b", "--gin_file=a"])
    assert values.gin_file == ["a", "b", "a"]


def test_asking_for_help():
    assert asks_for_help(["ddl", "--gin_file=a.gin", "-h"])
    assert not asks_for_help(["ddl", "--gin_file=--help"])


@pytest.mark.parametrize("name", ["model_dir", "gin_file", "log_dir", "predictions"])
def test_a_path_is_not_empty(name):
    values = flags.FlagValues()
    define = flags.DEFINE_multi_string if name == "gin_file" else flags.DEFINE_string
    define(name, None, "", flag_values=values)
    parse(values, ["ddl"])
    with pytest.raises(flags.Error, match=f"--{name} must be a path, got an empty text"):
        parse(values, ["ddl", f"--{name}="])
