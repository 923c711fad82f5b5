"""How the commands ddl, ddl-launch and ddl.lr_finder read their arguments."""

from collections.abc import Sequence

from absl import flags

_HELP = frozenset(["--help", "-help", "-h", "-?", "--helpfull"])


def asks_for_help(arguments: Sequence[str]) -> bool:
    """Whether any of them is one by which people ask for help."""
    return not _HELP.isdisjoint(arguments)


def parse(values: flags.FlagValues, arguments: Sequence[str]) -> None:
    """Gives flags their values; the first argument is the program's name.

    Raises:
      flags.Error: If an argument is no flag, or a value is wrong.
    """
    rest = values(arguments)
    if len(rest) > 1:
        raise flags.Error(f"'{rest[1]}' is not a flag; flags begin with --")


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
