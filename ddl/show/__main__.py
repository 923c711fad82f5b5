"""Command that shows where the values of a config come from, and how two configs differ.

  ddl show --gin_file=configs/digits_cnn.gin --gin_param='TRAIN_STEPS = 200'
  ddl show configs/digits_cnn.gin configs/digits_cnn_lars.gin
  ddl show runs/one runs/two

The first form takes the flags of `ddl train` and prints the config as a run would read it. Beside
each value, a comment names its file and line, or its flag, and what it overrides. The printed text
is itself a config.

With two configs, or folders of runs, the command prints what differs: values, not text. Macros are
replaced by their values, and a parameter without a binding has its default. One of the two may be
given by --gin_file and --gin_param, to compare a run with the next one. In a run's folder
the command reads config.gin, or with --used operative_config.gin, which has defaults and the seed.

The command builds nothing and writes nothing.

Exit status:
  0    Done, whether or not values differ.
  1    The flags or the config have an error, or a folder holds no run.
  70   Any other error: a bug, shown with its traceback, or a failure of the system.
  130  The command was interrupted.
"""

import sys
from collections.abc import Sequence

try:
    from absl import flags

    from ddl.cli.commands import exiting_on_errors, parse_flags_and_names
    from ddl.cli.flag_checks import check_flags_fit_mode
    from ddl.cli.flags import FLAGS as MAIN_FLAGS
    from ddl.cli.flags import flags_of, parse_checkpoint, parse_gpus, share
    from ddl.cli.terminal import width
except KeyboardInterrupt:  # else Python prints a traceback
    sys.exit(130)

FLAGS = flags.FlagValues()


def define_flags() -> None:
    """Defines every flag of the command line."""
    share(FLAGS, (flag.name for flag in flags_of(MAIN_FLAGS)))
    flags.DEFINE_bool(
        "defaults",
        False,
        "Also show the defaults of all items that the config refers to.",
        flag_values=FLAGS,
    )
    flags.DEFINE_bool(
        "used", False, "Read operative_config.gin of the folders of runs.", flag_values=FLAGS
    )


def check_flags(names: Sequence[str]) -> list[str]:
    """Returns the configs to show, "" for that of the flags.

    Raises:
      flags.Error: If there is none, there are more than two, or a flag is wrong.
    """
    MAIN_FLAGS.mark_as_parsed()
    parse_gpus(FLAGS.gpus)
    parse_checkpoint(FLAGS.checkpoint)
    check_flags_fit_mode()
    shown = list(names)
    if FLAGS.gin_file:
        shown.append("")
    elif FLAGS.gin_param and len(names) != 1:
        raise flags.Error(
            "--gin_param changes one config. Pass that config by --gin_file, and at most one other."
        )
    if len(shown) not in (1, 2):
        raise flags.Error(
            f"ddl show takes one config, or two to compare, got {len(shown)}. Pass configs or "
            "folders of runs, such as runs/one runs/two, or --gin_file=configs/digits_cnn.gin."
        )
    if FLAGS.defaults and len(shown) == 2:
        raise flags.Error("--defaults has no effect on a comparison. Leave it out.")
    return shown


def run(argv: Sequence[str] | None = None) -> None:
    """Runs the command, and exits with a status documented above.

    Args:
      argv: The program's name, then the arguments; None takes those of this process.
    """
    shown = parse_flags_and_names("ddl show", __doc__, FLAGS, argv, check_flags)
    with exiting_on_errors():
        show(shown)


def show(shown: Sequence[str]) -> None:
    """Prints a config, or the differences of two.

    Args:
      shown: Paths of configs or folders of runs, "" for the config of the flags.
    """
    from ddl.show.configs import read
    from ddl.show.text import comparison_lines, config_lines

    configs = [read(path, FLAGS, FLAGS.used, has_notes=len(shown) == 2) for path in shown]
    if len(configs) == 1:
        from ddl.show.defaults import defaults_of

        (one,) = configs
        for line in given_flags():
            print(line)
        defaults = defaults_of(one.bindings) if FLAGS.defaults else ()
        lines = config_lines(one.entries, one.imports, defaults, width())
    else:
        from ddl.config.explained.comparison import compare

        before, after = configs
        lines = comparison_lines(
            compare(before.bindings, after.bindings),
            (before.name, after.name),
            (before.imports, after.imports),
            width(),
        )
    for line in lines:
        print(line)


def given_flags() -> list[str]:
    """Returns comments with the flags given that say where a run executes."""
    of_configs = (*(name for name in FLAGS if name.startswith("gin_")), "defaults", "used")
    given = [
        f"#   --{name}={FLAGS[name].value}"
        for name in FLAGS
        if FLAGS[name].present and name not in of_configs
    ]
    return ["# Flags; all others have their defaults, see ddl list flags:", *given, ""][
        : None if given else 0
    ]


define_flags()

if __name__ == "__main__":
    run()
