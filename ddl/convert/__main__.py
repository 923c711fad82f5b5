"""Command that writes the data of a config into files that any example is read from by its number.

  python -m ddl.convert --gin_file=configs/digits_cnn.gin --output=data/digits

The command writes ArrayRecord files if the extra `arrayrecord` is installed, and else TFRecord
files with an index. Records of `record_files` are copied as they are: bind `record_files.files` to
the new files. All other data are decoded and stored feature by feature: bind `stored.folder` to the
new folder, and the data to `@stored()`.

Exit status:
  0    Done.
  1    The flags, the config or the data have an error, or the folder cannot be written.
  70   Any other error: a bug, shown with its traceback, or a failure of the system.
  130  The command was interrupted.
"""

import sys
from collections.abc import Sequence

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
    flags.DEFINE_string("output", None, "New or empty folder for the files.", flag_values=FLAGS)
    flags.DEFINE_enum(
        "format",
        "auto",
        ("auto", "array_record", "tfrecord"),
        "Format of the files. auto: array_record if its package is installed, else tfrecord.",
        flag_values=FLAGS,
    )
    flags.DEFINE_integer("shards", 1, "Number of files.", lower_bound=1, flag_values=FLAGS)


def check_flags() -> None:
    """Raises flags.Error if a flag is missing."""
    if not FLAGS.output:
        raise flags.Error("--output is required. Pass a new folder, such as --output=data/digits.")


def run(argv: Sequence[str] | None = None) -> None:
    """Runs the command, and exits with a status documented above.

    Args:
      argv: The program's name, then the arguments; None takes those of this process.
    """
    parse_command_line("ddl convert", __doc__, FLAGS, argv, check_flags)
    with exiting_on_errors():
        convert()


def convert() -> None:
    """Writes what the parsed flags ask for."""
    load_config(FLAGS)

    from ddl.config.registry import user_packages
    from ddl.run.data.conversion import convert_data
    from ddl.user_code import attributing_errors

    with attributing_errors(user_packages()):
        for line in convert_data(FLAGS.data, FLAGS.output, FLAGS.format, FLAGS.shards):
            print(printable(line))


define_flags()

if __name__ == "__main__":
    run()
