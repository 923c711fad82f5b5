r"""Command that compares a metric of two settings over several seeds, and says how sure it is.

  ddl compare runs/sweep --a='LEARNING_RATE = 0.05' --b='LEARNING_RATE = 0.1' --metric=accuracy
  ddl compare runs/one runs/other

A setting is a config; its runs differ in SEED alone. Each argument is the folder of a sweep, a
folder of runs, or a pattern of such paths in quotation marks. With one folder, --a and --b choose
the two settings, unless it has just two; with two folders, A is in the first and B in the second.

If the settings have seeds in common, their runs are compared in pairs: the command prints the
difference B − A for each seed, the mean difference with its 95% interval (paired t), and the
p-value of the sign-flip test. Otherwise the runs are compared unpaired (Welch's t).

Exit status:
  0    The settings are compared, whether or not they differ.
  1    The flags have an error, or the runs cannot be compared.
  70   Any other error: a bug, shown with its traceback, or a failure of the system.
  130  The command was interrupted.
"""

import sys
from collections.abc import Sequence

try:
    from absl import flags

    from ddl.cli.commands import exiting_on_errors, parse_flags_and_names
    from ddl.cli.metric_flags import define_metric_flags
    from ddl.cli.terminal import fitting
except KeyboardInterrupt:  # else Python prints a traceback
    sys.exit(130)

FLAGS = flags.FlagValues()


def define_flags() -> None:
    """Defines every flag of the command line."""
    flags.DEFINE_multi_string(
        "a", [], 'Binding that the runs of A have, such as "LEARNING_RATE = 0.1"', flag_values=FLAGS
    )
    flags.DEFINE_multi_string("b", [], "Binding that the runs of B have", flag_values=FLAGS)
    define_metric_flags(FLAGS, "Metric to compare")


def run(argv: Sequence[str] | None = None) -> None:
    """Runs the command, and exits with a status documented above.

    Args:
      argv: The program's name, then the arguments; None takes those of this process.
    """
    folders = parse_flags_and_names("ddl compare", __doc__, FLAGS, argv, check_flags)
    with exiting_on_errors():
        show(folders)


def check_flags(folders: Sequence[str]) -> Sequence[str]:
    """Returns the folders to compare.

    Raises:
      flags.Error: If there is none, there are more than two, or one of --a and --b is missing.
    """
    if len(folders) not in (1, 2):
        raise flags.Error(
            f"ddl compare takes one folder with both settings, or two folders, got {len(folders)}. "
            "Pass a sweep, such as runs/sweep, or a pattern in quotation marks, such as 'runs/a_*'."
        )
    if len(folders) == 1 and bool(FLAGS.a) != bool(FLAGS.b):
        raise flags.Error("--a and --b choose two settings of a folder. Pass both, or none.")
    return folders


def show(folders: Sequence[str]) -> None:
    """Prints the comparison of two settings."""
    # NumPy and gin take a while to import, so the flags are checked before.
    from ddl.compare.comparison import compare, lines
    from ddl.compare.runs import read_folder, settings
    from ddl.figures import direction_of

    metric, split = FLAGS.metric, FLAGS.split
    direction = direction_of(metric, FLAGS.best, "--best")
    runs = [read_folder(folder, metric, split) for folder in folders]
    a, b = settings(runs, FLAGS.a, FLAGS.b, metric)
    values = [{seed: run.value or 0.0 for seed, run in one.runs.items()} for one in (a, b)]
    for line in lines(compare(*values), a, b, metric, split, direction):
        print(fitting(line))


define_flags()

if __name__ == "__main__":
    run()
