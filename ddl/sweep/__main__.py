r"""Command that makes many runs of a config: a grid, lists or random draws of bindings.

  ddl sweep --gin_file=configs/digits_mlp.gin --sweep_dir=runs/sweep --metric=accuracy \
    --grid='LEARNING_RATE = [0.02, 0.05, 0.1]' --grid='SEED = [0, 1]' --at_once=2

Each run is a process of ddl.main with a directory of its own, runs/NAME in the folder of the sweep.
The same command resumes a sweep that was stopped or killed: finished runs are kept, and the others
resume from their checkpoints. More values or draws extend it. At the end the command prints a table
of the runs, and writes it to results.json and results.csv. SIGTERM and SIGINT are passed on to the
runs, which save; a second signal kills them.

Exit status:
  0    All runs have finished, diverged, or were stopped at a rung.
  1    The flags, the config or the data have an error, or a run ended with such an error.
  70   A run failed otherwise more often than --max_restarts allows, or another sweep runs there.
  75   A signal stopped the sweep; the same command resumes it.
  76   All runs diverged.
  130  The command was interrupted before its first run.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

try:
    from absl import flags

    from ddl.choices import PINS
    from ddl.cli.commands import exiting_on_errors, parse_command_line
    from ddl.cli.flags import FLAGS as MAIN_FLAGS
    from ddl.cli.flags import OF_CONFIG, parse_gpus, share
    from ddl.cli.metric_flags import define_metric_flags
except KeyboardInterrupt:  # else Python prints a traceback
    sys.exit(130)

FLAGS = flags.FlagValues()

# Flags of ddl.main that say where and how a run executes.
_PASSED_ON = (
    *("strategy", "num_virtual_devices", "virtual_gpu_memory", "gpus", "memory_growth"),
    *("deterministic_ops", "tf32", "jit_compile", "cross_device_ops", "num_packs"),
    *("steps_per_loop", "data_on_device", "shard_optimizer_state", "shard_gradients"),
)


def define_flags() -> None:
    """Defines every flag of the command line."""
    share(FLAGS, OF_CONFIG)
    flags.DEFINE_string("sweep_dir", None, "Folder of the sweep.", flag_values=FLAGS)
    flags.DEFINE_multi_string(
        "grid",
        [],
        'Binding to a list of values, such as "SEED = [0, 1]"; all combinations are run',
        flag_values=FLAGS,
    )
    flags.DEFINE_multi_string(
        "list",
        [],
        "Binding to a list of values; those at the same position of all lists are used together",
        flag_values=FLAGS,
    )
    flags.DEFINE_multi_string(
        "draw",
        [],
        'Binding to uniform(a, b), log_uniform(a, b) or choice([…]), such as "LEARNING_RATE = '
        'log_uniform(1e-4, 1e-1)"',
        flag_values=FLAGS,
    )
    flags.DEFINE_integer("draws", None, "Number of random draws.", lower_bound=1, flag_values=FLAGS)
    flags.DEFINE_integer("draw_seed", 0, "Seed of the random draws.", flag_values=FLAGS)
    define_metric_flags(FLAGS, "Metric of the table")
    flags.DEFINE_integer(
        "at_once", 1, "Number of runs at a time.", lower_bound=1, flag_values=FLAGS
    )
    flags.DEFINE_enum(
        "pin",
        None,
        PINS,
        "Pin each run to an equal share of the available cores, with as many threads, or to one "
        "GPU. The default is cores with several runs at a time, else none.",
        flag_values=FLAGS,
    )
    flags.DEFINE_integer(
        "max_restarts",
        1,
        "Maximum number of restarts of a run that a failure of the system ended.",
        lower_bound=0,
        flag_values=FLAGS,
    )
    flags.DEFINE_enum(
        "stop_early",
        "none",
        ("none", "successive_halving"),
        "Whether to stop settings that are worse than the others at a rung. A setting is the runs "
        "that differ in SEED alone.",
        flag_values=FLAGS,
    )
    flags.DEFINE_list(
        "rungs", [], "Steps at which --stop_early compares the settings.", flag_values=FLAGS
    )
    flags.DEFINE_float(
        "keep",
        0.5,
        "Share of the settings that --stop_early trains beyond each rung.",
        flag_values=FLAGS,
    )
    flags.DEFINE_bool(
        "dry_run", False, "Check everything, list the runs and start none.", flag_values=FLAGS
    )
    share(FLAGS, _PASSED_ON)


def run(argv: Sequence[str] | None = None) -> None:
    """Runs the command, and exits with a status documented above.

    Args:
      argv: The program's name, then the arguments; None takes those of this process.
    """
    parse_command_line("ddl sweep", __doc__, FLAGS, argv, check_flags)
    with exiting_on_errors():
        sys.exit(start())


def check_flags() -> None:
    """Checks the parsed flags.

    Raises:
      flags.Error: If a flag is missing, wrong or without effect.
    """
    if not sys.platform.startswith("linux"):
        raise flags.Error(f"ddl sweep requires Linux, got {sys.platform}. Start each run yourself.")
    if FLAGS.sweep_dir is None:
        raise flags.Error(
            "--sweep_dir is required. Pass a folder for the sweep, such as --sweep_dir=runs/sweep."
        )
    if "://" in FLAGS.sweep_dir:
        raise flags.Error(
            f"--sweep_dir must be a local path, got the URL {FLAGS.sweep_dir}. Pass a local folder."
        )
    parse_gpus(FLAGS.gpus)
    halves = FLAGS.stop_early == "successive_halving"
    if halves and not FLAGS.rungs:
        raise flags.Error(
            "--stop_early=successive_halving needs --rungs. Pass steps, such as --rungs=100,300."
        )
    for name in ("rungs", "keep"):
        if FLAGS[name].present and not halves:
            raise flags.Error(
                f"--{name} has no effect without --stop_early=successive_halving. Pass both, or "
                "leave it out."
            )
    for rung in FLAGS.rungs:
        if not rung.isdecimal():
            raise flags.Error(f"--rungs must be steps, such as 100,300, got {rung!r}.")
    if FLAGS.draw_seed and not FLAGS.draw:
        raise flags.Error("--draw_seed has no effect without --draw. Leave it out.")


def start() -> int:
    """Makes the sweep that the parsed flags describe, and returns the exit status."""
    # gin takes a while to import, so the flags are checked before.
    from ddl.figures import direction_of
    from ddl.sweep.axes import points
    from ddl.sweep.halving import Halving
    from ddl.sweep.scheduler import Metric
    from ddl.sweep.sweep import Config, Sweep
    from ddl.sweep.sweep import run as run_sweep

    direction = direction_of(FLAGS.metric, FLAGS.best, "--best")
    halving = None
    if FLAGS.stop_early == "successive_halving":
        halving = Halving(tuple(map(int, FLAGS.rungs)), FLAGS.keep, direction)
    axes = {name: FLAGS[name].value for name in ("grid", "list", "draw", "draws", "draw_seed")}
    sweep = Sweep(
        folder=Path(FLAGS.sweep_dir),
        base=Config(
            FLAGS.gin_file,
            FLAGS.gin_param or (),
            FLAGS.gin_search_path or (),
            FLAGS.gin_allow_unused,
        ),
        points=points(*(FLAGS[name].value for name in axes)),
        axes=axes,
        metric=Metric(FLAGS.metric, FLAGS.split),
        direction=direction,
        halving=halving,
        flags=[MAIN_FLAGS[name].serialize() for name in _PASSED_ON if FLAGS[name].present],
        at_once=FLAGS.at_once,
        pin=FLAGS.pin or ("cores" if FLAGS.at_once > 1 else "none"),
        max_restarts=FLAGS.max_restarts,
    )
    return run_sweep(sweep, FLAGS.dry_run)


define_flags()

if __name__ == "__main__":
    run()
