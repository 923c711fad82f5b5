"""Argument parsing of the commands ddl, ddl-launch and ddl.lr_finder."""

from collections.abc import Sequence

from absl import flags

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
      flags.Error: If an argument is not a flag, a value is invalid, or a single-valued flag is
        given twice.
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
    if len(rest) > 1:
        raise flags.Error(f"'{rest[1]}' is not a flag. Flags begin with --.")


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
