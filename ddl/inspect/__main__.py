"""Command that shows the data of a config, and how fast they are read.

  python -m ddl.inspect --gin_file=configs/digits_cnn.gin --output=runs/pictures

The command builds the data of the config, without model and optimizer, and reads a batch in the
order of the run. It prints shapes, dtypes, ranges, counts of labels, and examples; images as
characters, or as PNG files in --output. It then times the reading of further batches on the host,
as they are read by one process for one device.

Exit status:
  0    Done.
  1    The flags, the config or the data have an error.
  70   Any other error: a bug, shown with its traceback, or a failure of the system.
  130  The command was interrupted.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

try:
    from absl import flags

    from ddl.cli.commands import exiting_on_errors, parse_command_line
    from ddl.cli.flags import define_data_flags
    from ddl.cli.loading import load_config
    from ddl.output import printable
except KeyboardInterrupt:  # else Python prints a traceback
    sys.exit(130)

FLAGS = flags.FlagValues()


def define_flags() -> None:
    """Defines every flag of the command line."""
    define_data_flags(FLAGS)
    flags.DEFINE_integer(
        "batch",
        0,
        "Number of the batch, counted from 0 over the whole run.",
        lower_bound=0,
        flag_values=FLAGS,
    )
    flags.DEFINE_integer("rows", 4, "Examples to show.", lower_bound=0, flag_values=FLAGS)
    flags.DEFINE_string("output", None, "Folder for PNG files of the images.", flag_values=FLAGS)
    flags.DEFINE_integer(
        "timed_batches",
        50,
        "Batches to time; 0 leaves the speed out.",
        lower_bound=0,
        flag_values=FLAGS,
    )


def run(argv: Sequence[str] | None = None) -> None:
    """Runs the command, and exits with a status documented above.

    Args:
      argv: The program's name, then the arguments; None takes those of this process.
    """
    parse_command_line("ddl inspect", __doc__, FLAGS, argv, lambda: None)
    with exiting_on_errors():
        show()


def show() -> None:
    """Prints what the parsed flags ask for."""
    load_config(FLAGS)

    from ddl.config.registry import user_packages
    from ddl.run.data.inspection import inspect
    from ddl.user_code import attributing_errors

    with attributing_errors(user_packages()):
        for line in inspect(
            FLAGS.data,
            batch=FLAGS.batch,
            rows=FLAGS.rows,
            folder=Path(FLAGS.output) if FLAGS.output else None,
            timed_batches=FLAGS.timed_batches,
        ):
            print(printable(line))


define_flags()

if __name__ == "__main__":
    run()
