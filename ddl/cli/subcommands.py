"""The subcommands of `ddl`: the one table of them, and their start.

Imports neither absl nor TensorFlow.
"""

import importlib
from collections.abc import Sequence
from typing import NamedTuple

from ddl.errors import did_you_mean

HELP = frozenset(["--help", "-help", "-h", "-?", "--helpfull"])
"""The arguments that ask for help."""


class Subcommand(NamedTuple):
    """A subcommand `ddl NAME`.

    Attributes:
      module: The module with its function `run(argv)`, which `python -m` also starts.
      purpose: One line for `ddl --help`.
    """

    module: str
    purpose: str


SUBCOMMANDS: dict[str, Subcommand] = {
    "train": Subcommand("ddl.main", "Train, evaluate, export or predict, as a config says."),
    "launch": Subcommand("ddl.launch", "Start and watch a cluster of processes on this machine."),
    "check": Subcommand("ddl.check", "Check that a task computes the same on any devices."),
}


def overview() -> str:
    """Returns the text of `ddl --help`: a line for each subcommand."""
    width = max(map(len, SUBCOMMANDS))
    lines = [f"  {name:{width}}  {command.purpose}" for name, command in SUBCOMMANDS.items()]
    return "\n".join(
        [
            "Usage: ddl COMMAND [ARGUMENTS]",
            "",
            "Commands:",
            *lines,
            "",
            "`ddl COMMAND --help` shows the flags of a command. Without a command, flags are",
            "those of train: `ddl --gin_file=… --model_dir=…`.",
        ]
    )


def unknown(name: str) -> str:
    """Returns the message for a name that is no subcommand."""
    hint = did_you_mean(name, SUBCOMMANDS)
    return (
        f"There is no command {name!r}.{hint} The commands are {', '.join(SUBCOMMANDS)}; "
        "ddl --help explains them."
    )


def start(name: str, arguments: Sequence[str]) -> None:
    """Runs a subcommand; it exits with its status.

    Args:
      name: A key of `SUBCOMMANDS`.
      arguments: The arguments after the name.
    """
    importlib.import_module(SUBCOMMANDS[name].module).run([f"ddl {name}", *arguments])
