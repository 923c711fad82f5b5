"""Command that checks that a task computes the same on any number of devices.

  python -m ddl.check --gin_file=configs/digits_cnn.gin

The task of the config makes three updates on 1, 2 and 4 virtual CPU devices with 1 and 2
microbatches each, in float64, on its first examples. One run resumes from a checkpoint in a fresh
process. The command compares all values and names the first one that differs, with its likely cause
and the remedy. It reads and writes no --model_dir.

Exit status:
  0    The task computes the same everywhere.
  1    It does not, or the flags or the config have an error.
  70   Any other error: a bug, shown with its traceback, or a failure of the system.
  130  The command was interrupted; 143 if by SIGTERM.
"""

import signal
import sys
from collections.abc import Sequence

from ddl.cli.commands import exiting_on_errors, parse
from ddl.cli.flags import config_flags
from ddl.output import printable


def run(argv: Sequence[str] | None = None) -> None:
    """Runs the command, and exits with a status documented above.

    Args:
      argv: The program's name, then the arguments; None takes those of this process.
    """
    with exiting_on_errors("ddl check"):
        values = config_flags()
        parse(values, argv, __doc__)
        # Else a SIGTERM would leave processes and their folder behind.
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        # NumPy and gin take a while to import, so the flags are checked before.
        from ddl.checking import check_config

        report = check_config(
            values.gin_file,
            values.gin_param or (),
            values.gin_search_path or (),
            values.gin_allow_unused,
        )
        print(printable(str(report)))
        sys.exit(0 if report.same else 1)


if __name__ == "__main__":
    run()
