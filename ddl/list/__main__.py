"""Command that lists what configs and flags can name.

  ddl list
  ddl list tasks optimizers
  ddl list Classification Trainer.clip_norm GLOBAL_BATCH_SIZE strategy

Without a name, the command lists the kinds: run, tasks, models, sources, optimizers, schedules,
losses, metrics, callbacks, layers, initializers, regularizers, constraints, others; and macros,
flags, configs, commands. For a kind, it shows each item with its parameters, their types and
defaults, and the first line of its docstring. For an item, a parameter, a macro or a flag, it shows
the whole documentation.

The items are those of ddl and Keras. Pass a config by --gin_file, or 'import my_task' by
--gin_param, to add the items of the modules that it imports.

Exit status:
  0    Done.
  1    There is no such name, or the flags or the config have an error.
  70   Any other error: a bug, shown with its traceback, or a failure of the system.
  130  The command was interrupted.
"""

import sys
from collections.abc import Sequence

try:
    from absl import flags

    from ddl.cli.commands import exiting_on_errors, parse_flags_and_names
    from ddl.cli.flags import share
    from ddl.cli.terminal import width
except KeyboardInterrupt:  # else Python prints a traceback
    sys.exit(130)

FLAGS = flags.FlagValues()

# Flags of ddl.main that name the modules of the user's items.
_OF_MAIN = ("gin_file", "gin_param", "gin_bindings", "gin_search_path")


def define_flags() -> None:
    """Defines every flag of the command line."""
    share(FLAGS, _OF_MAIN)


def run(argv: Sequence[str] | None = None) -> None:
    """Runs the command, and exits with a status documented above.

    Args:
      argv: The program's name, then the arguments; None takes those of this process.
    """
    names = parse_flags_and_names("ddl list", __doc__, FLAGS, argv, lambda given: given)
    with exiting_on_errors():
        from ddl.list.finding import listing

        for line in listing(
            names,
            FLAGS.gin_file or (),
            FLAGS.gin_param or (),
            FLAGS.gin_search_path or (),
            width(),
        ):
            print(line)


define_flags()

if __name__ == "__main__":
    run()
