"""The subcommands of `ddl`: the one table of them, and their start.

Imports neither absl nor TensorFlow.
"""

import importlib
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from ddl.errors import did_you_mean

HELP = frozenset(["--help", "-help", "-h", "-?", "--helpfull"])
"""The arguments that ask for help."""


class Subcommand(NamedTuple):
    """A subcommand `ddl NAME`, which `python -m ddl.NAME` also starts.

    Attributes:
      module: The module with its function `run(argv)` and its flags `FLAGS`.
      purpose: One line for `ddl --help`.
    """

    module: str
    purpose: str


# A new subcommand is a line here, and a module ddl.NAME or ddl.NAME.__main__.
SUBCOMMANDS: dict[str, Subcommand] = {
    "train": Subcommand("ddl.main", "Train, evaluate, export or predict, as a config says."),
    "launch": Subcommand("ddl.launch", "Start and watch a cluster of processes on this machine."),
    "check": Subcommand("ddl.check", "Check that a task computes the same on any devices."),
    "lr_finder": Subcommand("ddl.lr_finder.__main__", "Make a learning rate range test."),
    "generate": Subcommand("ddl.generate.__main__", "Continue a text with the model of a run."),
    "inspect": Subcommand("ddl.inspect.__main__", "Show a config's data, and time their reading."),
    "convert": Subcommand("ddl.convert.__main__", "Write a config's data into record files."),
    "list": Subcommand("ddl.list.__main__", "List what configs and flags can name, with types."),
    "show": Subcommand(
        "ddl.show.__main__", "Show where a config's values come from, or compare two."
    ),
    "report": Subcommand("ddl.report.__main__", "Show and compare runs on one HTML page."),
    "sweep": Subcommand("ddl.sweep.__main__", "Train a config with many values of its bindings."),
    "compare": Subcommand("ddl.compare.__main__", "Compare two settings over several seeds."),
    "replay": Subcommand(
        "ddl.replay.__main__", "Compute a past update again; find when an example was read."
    ),
    "bisect": Subcommand("ddl.bisect.__main__", "Find the first step at which two runs differ."),
    "completion": Subcommand("ddl.completion.__main__", "Print completions for a shell."),
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
            "`ddl COMMAND --help` shows the flags of a command. `python -m ddl.COMMAND`",
            "starts it, too. Without a command, flags are those of train:",
            "`ddl --gin_file=… --model_dir=…`.",
        ]
    )


def unknown(name: str) -> str:
    """Returns the message for a name that is no subcommand."""
    hint = did_you_mean(name, SUBCOMMANDS)
    return (
        f"There is no command {name!r}.{hint} The commands are {', '.join(SUBCOMMANDS)}; "
        "ddl --help explains them."
    )


def load(name: str) -> Any:
    """Imports and returns the module of a subcommand."""
    return importlib.import_module(SUBCOMMANDS[name].module)


def start(name: str, arguments: Sequence[str] | None = None) -> None:
    """Runs a subcommand; it exits with its status.

    Args:
      name: A key of `SUBCOMMANDS`.
      arguments: The arguments after the name; None takes those of this process.
    """
    given = sys.argv[1:] if arguments is None else arguments
    load(name).run([f"ddl {name}", *given])
