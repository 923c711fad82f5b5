"""Command that shows and compares runs on one HTML page.

  ddl report runs/one runs/two --output=report.html

The page has the curves of all metrics, the last values with the best in bold, restarts and
warnings, the configs, and what differs between them. It needs no network and no other file. The
command only reads the runs: they may be training, and may be of an earlier version of ddl.

Exit status:
  0    The page is written. Runs that could not be read are named in it, and in the output.
  1    The flags have an error, or the page cannot be written.
  70   Any other error: a bug, shown with its traceback, or a failure of the system.
  130  The command was interrupted.
"""

import sys
from collections.abc import Sequence

try:
    from absl import flags

    from ddl.cli.commands import exiting_on_errors, parse_flags_and_names
    from ddl.cli.terminal import fitting
except KeyboardInterrupt:  # else Python prints a traceback
    sys.exit(130)

FLAGS = flags.FlagValues()


def define_flags() -> None:
    """Defines every flag of the command line."""
    flags.DEFINE_string("output", None, "The HTML file to write.", flag_values=FLAGS)
    flags.DEFINE_string("pictures", None, "Folder for PNG files of the charts.", flag_values=FLAGS)
    flags.DEFINE_list(
        "figures",
        [],
        "Names of the figures to draw, such as loss,f1/*. By default all are drawn.",
        flag_values=FLAGS,
    )


def run(argv: Sequence[str] | None = None) -> None:
    """Runs the command, and exits with a status documented above.

    Args:
      argv: The program's name, then the arguments; None takes those of this process.
    """
    runs = parse_flags_and_names("ddl report", __doc__, FLAGS, argv, check_flags)
    with exiting_on_errors():
        from ddl.report.writing import write_report

        for line in write_report(runs, FLAGS.output, FLAGS.pictures, FLAGS.figures):
            print(fitting(line))


def check_flags(runs: Sequence[str]) -> Sequence[str]:
    """Returns the runs to show.

    Raises:
      flags.Error: If there is no run or no file to write.
    """
    if not runs:
        raise flags.Error("A run is required. Pass one or more, such as runs/digits.")
    if FLAGS.output is None:
        raise flags.Error("--output is required. Pass a file, such as --output=report.html.")
    return runs


define_flags()

if __name__ == "__main__":
    run()
