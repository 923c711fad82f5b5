"""Command that checks that a task computes the same on any number of devices.

  python -m ddl.check --gin_file=configs/digits_cnn.gin

The task of the config makes three updates on 1, 2 and 4 virtual CPU devices and with central
storage, in float64, on its first examples. A new process resumes one run from a checkpoint. The
command compares losses, metrics and variables after each update, and names the first one that
differs, with its likely cause and the remedy. It reads and writes no --model_dir.

Exit status:
  0    The task computes the same everywhere.
  1    It does not, or the flags or the config have an error.
  70   Any other error: a bug, shown with its traceback, or a failure of the system.
  130  The command was interrupted; 75 or 143 if by SIGTERM.
"""

import os
import sys
from collections.abc import Sequence

from ddl.cli.commands import exiting_on_errors, parse
from ddl.cli.flags import config_flags
from ddl.output import printable, say


def run(argv: Sequence[str] | None = None) -> None:
    """Runs the command, and exits with a status documented above.

    Args:
      argv: The program's name, then the arguments; None takes those of this process.
    """
    with exiting_on_errors("ddl check"):
        values = config_flags()
        parse(values, argv, __doc__)
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # hides TensorFlow's start-up messages
        say("Three updates in each of five places, which takes a minute or more.")
        # TensorFlow takes a while to import, so the flags are checked before.
        from ddl.checking import TrainerOfConfig, check

        parts = (values.gin_file, values.gin_param, values.gin_search_path, values.gin_allow_unused)
        report = check(TrainerOfConfig(*(tuple(part or ()) for part in parts)))
        print(printable(str(report)))
        sys.exit(0 if report.same else 1)


if __name__ == "__main__":
    run()
