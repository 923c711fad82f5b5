"""Command that finds the first step at which two runs differ, and the first thing in it.

  ddl bisect runs/before runs/after
  ddl bisect runs/before runs/after --code_a=../checkout-before

The checkpoints that both runs have are compared first. The steps in between are halved by replays
of both runs, and the last four steps are recorded: the command names the step, the stage (data,
draw, activation, gradient, reduced gradient, slot, …) and the value that differs first. Each run is
rebuilt from its own operative_config.gin with its own code, on the devices that it had unless flags
name others. The directories of the runs are only read.

Exit status:
  0    Done, whether or not the runs differ.
  1    The flags have an error, or the runs cannot be replayed or compared.
  70   Any other error: a bug, shown with its traceback, or a failure of the system.
  130  The command was interrupted; 143 if by SIGTERM.
"""

import signal
import sys
from collections.abc import Sequence
from pathlib import Path

try:
    from absl import flags

    from ddl.cli.commands import exiting_on_errors, parse_flags_and_names
    from ddl.cli.replaying import (
        chosen_devices,
        define_replay_flags,
        directories,
        folder_of_code,
        given_flags,
    )
    from ddl.output import printable
except KeyboardInterrupt:  # else Python prints a traceback
    sys.exit(130)

FLAGS = flags.FlagValues()


def define_flags() -> None:
    """Defines every flag of the command line."""
    for name, which in (("code_a", "first"), ("code_b", "second")):
        flags.DEFINE_string(
            name,
            None,
            f"Folder from which the own modules of the {which} run are imported, such as a "
            "checkout of that time.",
            flag_values=FLAGS,
        )
    flags.DEFINE_bool(
        "verify",
        True,
        "Replay the runs on to the checkpoint that differs, and compare each with its own.",
        flag_values=FLAGS,
    )
    define_replay_flags(FLAGS)


def run(argv: Sequence[str] | None = None) -> None:
    """Runs the command, and exits with a status documented above.

    Args:
      argv: The program's name, then the arguments; None takes those of this process.
    """
    paths, code = parse_flags_and_names("ddl bisect", __doc__, FLAGS, argv, check_flags)
    # Else a SIGTERM would leave processes and their folder behind.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with exiting_on_errors():
        show(paths, code)


def check_flags(paths: Sequence[str]) -> tuple[list[Path], list[Path | None]]:
    """Returns the directories of the runs, and the folders of their code.

    Raises:
      flags.Error: If there are not two runs, or a folder of code does not exist.
    """
    found = directories(paths, 2, "ddl bisect", "ddl bisect runs/before runs/after")
    names = ("code_a", "code_b")
    return found, [folder_of_code(name, FLAGS[name].value) for name in names]


def show(paths: Sequence[Path], code: Sequence[Path | None]) -> None:
    """Prints the first difference of two runs."""
    # NumPy and gin take a while to import, so the flags are checked before.
    from ddl.bisect.bisecting import bisect

    def tell(line: str) -> None:
        print(printable(line), flush=True)

    chosen = chosen_devices(FLAGS)
    for line in bisect(paths, code, given_flags(FLAGS), chosen, verify=FLAGS.verify, report=tell):
        tell(line)


define_flags()

if __name__ == "__main__":
    run()
