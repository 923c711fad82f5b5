"""Argument parsing of the commands ddl, ddl-launch, ddl.lr_finder and ddl.check."""

from collections.abc import Sequence
from typing import Any

from absl import flags

# Flags whose empty value would mean the working directory.
_PATHS = ("model_dir", "gin_file", "log_dir", "output", "predictions", "prompt_file")

_HELP = frozenset(["--help", "-help", "-h", "-?", "--helpfull"])


def asks_for_help(arguments: Sequence[str]) -> bool:
    """Returns whether any argument asks for help, such as --help or -h."""
    return not _HELP.isdisjoint(arguments)


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
        rest = values(arguments)
    except flags.IllegalFlagValueError as error:
        if "already defined as" in str(error):
            raise flags.Error(f"{error}. Pass this flag once.") from error
        raise
    for name in _PATHS:
        if name in values and values[name].present and "" in _listed(values[name].value):
            raise flags.Error(
                f"--{name} must be a path, got an empty text. A variable of the shell may be unset."
            )
    if len(rest) > 1:
        raise flags.Error(f"'{rest[1]}' is not a flag. Flags begin with --.")


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
