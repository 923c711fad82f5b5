"""The command `ddl`, also `python -m ddl`: it starts its subcommands.

  ddl train --gin_file=configs/digits_cnn.gin --model_dir=runs/digits

Without a subcommand the flags are those of `ddl train`. `ddl --help` lists the subcommands, and
imports none of them. The exit status is that of the subcommand; 1 if there is no such command.
"""

import sys
from collections.abc import Sequence

try:
    from ddl import __version__
    from ddl.cli.subcommands import HELP, SUBCOMMANDS, overview, start, unknown
    from ddl.output import protect_standard_streams, say
except KeyboardInterrupt:  # else Python prints a traceback
    sys.exit(130)


def run(argv: Sequence[str] | None = None) -> None:
    """Runs the command `ddl`, and exits with the status of the subcommand.

    Args:
      argv: The program's name, then the arguments; None takes those of this process.
    """
    arguments = list(sys.argv if argv is None else argv)[1:]
    name, *rest = arguments or [""]
    if name in SUBCOMMANDS:
        start(name, rest)
    elif name == "help" and rest[:1] and rest[0] in SUBCOMMANDS:
        start(rest[0], ["--help"])
    elif name in HELP or (name == "help" and not rest):
        protect_standard_streams("ddl")
        print(overview())
    elif name == "--version":
        protect_standard_streams("ddl")
        print(f"ddl {__version__}")
    elif name.startswith("-"):
        start("train", arguments)
    else:
        protect_standard_streams("ddl")
        wrong = rest[0] if name == "help" else name
        say(unknown(wrong) if wrong else f"A command is required.\n{overview()}")
        sys.exit(1)


if __name__ == "__main__":
    run()
