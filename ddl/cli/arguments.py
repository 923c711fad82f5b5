"""Argument parsing of all commands."""

from collections.abc import Sequence
from typing import Any

from absl import flags

from ddl.cli.subcommands import HELP

# Flags whose empty value would mean the working directory.
_PATHS = ("model_dir", "gin_file", "log_dir", "predictions")


def asks_for_help(arguments: Sequence[str]) -> bool:
    """Returns whether any argument asks for help, such as --help or -h."""
    return not HELP.isdisjoint(arguments)


def parse(values: flags.FlagValues, arguments: Sequence[str]) -> None:
    """Parses arguments into flag values.

    Args:
      values: The flags, which get their values here.
      arguments: The program's name, then the arguments.

    Raises:
      flags.Error: If an argument is not a flag, a value is invalid, a path is empty, or a
        single-valued flag is given twice.
    """
    for name in values:
        # By default absl keeps the last value and ignores the earlier ones silently.
        values[name].allow_overwrite = isinstance(values[name], flags.MultiFlag)
    try:
        rest = values(arguments)[1:]
    except flags.IllegalFlagValueError as error:
        if "already defined as" in str(error):
            raise flags.Error(f"{error}. Pass this flag once.") from error
        raise
    for name in _PATHS:
        if name in values and values[name].present and "" in _listed(values[name].value):
            raise flags.Error(
                f"--{name} must be a path, got an empty text. A variable of the shell may be unset."
            )
    if rest:
        raise flags.Error(f"'{rest[0]}' is not a flag. Flags begin with --.")


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def with_aliases(arguments: Sequence[str]) -> list[str]:
    """Rewrites --gin.NAME=VALUE to --gin_param=NAME=VALUE."""
    rewritten = []
    for argument in arguments:
        name = argument.lstrip("-")
        if argument.startswith("-") and name.startswith("gin."):
            rewritten.append(f"--gin_param={name.removeprefix('gin.')}")
        else:
            rewritten.append(argument)
    return rewritten
