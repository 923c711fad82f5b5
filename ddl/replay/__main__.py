"""Command that computes a past update of a run again, and shows its values.

  ddl replay runs/digits --step=120
  ddl replay runs/digits --step=120 --show=examples,gradients --output=step120.npz
  ddl replay runs/digits --example=1042

The command rebuilds the run from its operative_config.gin, restores the newest checkpoint before
the step, or else the initial weights, and trains on to the step, on the devices that the run had
unless flags name others. It prints the indices of the batch, the norms of activations and
gradients, and the update of each variable; --output saves them as arrays. With --example it says at
which steps the run read an example. The directory of the run is only read.

Exit status:
  0    Done. The output says whether the replay ends at the bits of the run's checkpoint.
  1    The flags have an error, or the run cannot be replayed.
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

_SHOWN = ("indices", "examples", "activations", "gradients", "update")


def define_flags() -> None:
    """Defines every flag of the command line."""
    flags.DEFINE_integer(
        "step", None, "The update to compute again, counted from 1.", flag_values=FLAGS
    )
    flags.DEFINE_integer(
        "example",
        None,
        "Index of a training example, from 0: shows when the run read it, instead of --step.",
        lower_bound=0,
        flag_values=FLAGS,
    )
    flags.DEFINE_list(
        "show",
        ["indices", "activations", "gradients", "update"],
        f"Values to show and save: {', '.join(_SHOWN)}.",
        flag_values=FLAGS,
    )
    flags.DEFINE_string(
        "output", None, "File for the values as arrays, which ends with .npz.", flag_values=FLAGS
    )
    flags.DEFINE_bool(
        "verify",
        False,
        "Train on to the run's next checkpoint and compare with it.",
        flag_values=FLAGS,
    )
    flags.DEFINE_string(
        "code",
        None,
        "Folder from which the run's own modules are imported, such as a checkout of that time.",
        flag_values=FLAGS,
    )
    define_replay_flags(FLAGS)


def run(argv: Sequence[str] | None = None) -> None:
    """Runs the command, and exits with a status documented above.

    Args:
      argv: The program's name, then the arguments; None takes those of this process.
    """
    path, code = parse_flags_and_names("ddl replay", __doc__, FLAGS, argv, check_flags)
    # Else a SIGTERM would leave processes and their folder behind.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with exiting_on_errors():
        if FLAGS.example is not None:
            show_example(path)
        else:
            show_step(path, code)


def check_flags(paths: Sequence[str]) -> tuple[Path, Path | None]:
    """Returns the directory of the run, and the folder of its code.

    Raises:
      flags.Error: If there is no run, not one of --step and --example, or a wrong --show.
    """
    (path,) = directories(paths, 1, "ddl replay", "ddl replay runs/digits --step=120")
    if (FLAGS.step is None) == (FLAGS.example is None):
        raise flags.Error("Pass --step, such as --step=120, or --example, and not both.")
    for name in FLAGS.show:
        if name not in _SHOWN:
            raise flags.Error(f"--show must name some of {', '.join(_SHOWN)}, got {name!r}.")
    if FLAGS.output is not None and not FLAGS.output.endswith(".npz"):
        raise flags.Error(f"--output must end with .npz, got {FLAGS.output}.")
    if FLAGS.output is not None and path.resolve() in Path(FLAGS.output).resolve().parents:
        raise flags.Error("--output must not lie in the directory of the run, which is only read.")
    return path, folder_of_code("code", FLAGS.code)


def show_step(path: Path, code: Path | None) -> None:
    """Prints, and saves, what is asked for of an update."""
    # NumPy and gin take a while to import, so the flags are checked before.
    from ddl.replay.devices import placed
    from ddl.replay.folder import read_run, unchanged
    from ddl.replay.replaying import replay
    from ddl.replay.values import tables
    from ddl.replay.writing import write_arrays

    found = read_run(path)
    found.check_step(FLAGS.step)
    given = [f"--gin_file={found.config}", *given_flags(FLAGS)]
    devices = placed(found, FLAGS.step, given, chosen_devices(FLAGS))
    with unchanged([path]):
        one = replay(found, FLAGS.step, devices, code=code, verify=FLAGS.verify)
    origin = f"checkpoint step-{one.began}" if one.began else "the initial weights"
    for line in (
        f"{path}, step {one.step:,} of {found.reached:,}, computed from {origin} on",
        f"devices: {devices.text}",
        one.verdict,
        *one.notes,
        *tables(one.recorded, one.step, FLAGS.show),
    ):
        print(printable(line))
    if FLAGS.output is not None:
        write_arrays(Path(FLAGS.output), one.recorded, one.step, FLAGS.show)
        print(printable(f"\nWrote {FLAGS.output}."))


def show_example(path: Path) -> None:
    """Prints when the run read an example."""
    from ddl.cli.loading import prepare
    from ddl.replay.folder import read_run

    found = read_run(path)
    with prepare():  # in which TensorFlow starts
        from ddl import config

        config.load([str(found.config)], FLAGS.gin_param or (), FLAGS.gin_search_path or (), ())

        from ddl.config.registry import user_packages
        from ddl.replay.seen import seen
        from ddl.user_code import attributing_errors

        with attributing_errors(user_packages()):
            lines = list(seen(found, FLAGS.example))
    for line in lines:
        print(printable(line))


define_flags()

if __name__ == "__main__":
    run()
