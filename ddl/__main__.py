"""The command `ddl`, also `python -m ddl`: it starts its subcommands.

  ddl train --gin_file=configs/digits_cnn.gin --model_dir=runs/digits

Without a subcommand the flags are those of `ddl train`. `ddl --help` lists the subcommands, and
imports none of them. The exit status is that of the subcommand; 1 if there is no such command.
"""

import importlib
import sys
from collections.abc import Sequence

from ddl import __version__
from ddl.errors import did_you_mean
from ddl.output import protect_standard_streams, say

SUBCOMMANDS = {
    "train": ("ddl.main", "Train, evaluate, export or predict, as a config says."),
    "launch": ("ddl.launch", "Start and watch a cluster of processes on this machine."),
    "check": ("ddl.check", "Check that a task computes the same on any devices."),
}
"""The module of each subcommand, with its function `run(argv)`, and a line for `ddl --help`."""

_LINES = "\n".join(f"  {name:6}  {purpose}" for name, (_, purpose) in SUBCOMMANDS.items())
_OVERVIEW = f"""Usage: ddl COMMAND [ARGUMENTS]

Commands:
{_LINES}

`ddl COMMAND --help` shows the flags of a command. Without a command, flags are
those of train: `ddl --gin_file=… --model_dir=…`."""


def run(argv: Sequence[str] | None = None) -> None:
    """Runs the command `ddl`, and exits with the status of the subcommand.

    Args:
      argv: The program's name, then the arguments; None takes those of this process.
    """
    name, *rest = (sys.argv if argv is None else argv)[1:] or ["--help"]
    if name.startswith("-") and name not in ("--help", "-h", "--version"):
        name, rest = "train", [name, *rest]  # the flags of `ddl train`
    if name in SUBCOMMANDS:
        importlib.import_module(SUBCOMMANDS[name][0]).run([f"ddl {name}", *rest])
        return
    protect_standard_streams("ddl")
    if not name.startswith("-"):
        say(f"There is no command {name!r}.{did_you_mean(name, SUBCOMMANDS)}\n{_OVERVIEW}")
        sys.exit(1)
    print(f"ddl {__version__}" if name == "--version" else _OVERVIEW)


if __name__ == "__main__":
    run()
