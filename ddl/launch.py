"""Starts a cluster on this machine: so many processes of ddl.main, and watches them.

  python -m ddl.launch --num_workers=2 -- --gin_file=configs/digits_cnn.gin --model_dir=runs/digits

What comes after -- are the flags of ddl.main; --strategy is chosen unless it is among them. Each
process is told its place by TF_CONFIG. The first one's output is shown, the others' goes to files.
When one dies the rest is ended. SIGTERM and SIGINT are passed on to all; a second one kills them.

Exit status: 0 done; else the worst of the processes' statuses, those apart that were ended because
another died: 128 + N killed by signal N; 76 training diverged; 1 an error in flags, config or
data; any other, such as 70, a bug or the system's doing; 77 a process lost another; 75 stopped by a
signal after saving. --max_restarts starts all again from the last checkpoint, but not after 76, 1
or a signal to stop. With parameter servers a worker that died is started again alone, and the run
goes on meanwhile.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from ddl.choices import PINS
from ddl.cli.arguments import asks_for_help, parse, with_aliases
from ddl.cli.flags import FLAGS as MAIN_FLAGS
from ddl.distribution.traits import strategy_of_cluster
from ddl.errors import ConfigError, DdlError
from ddl.launcher.cluster import Cluster

# Apart from those of ddl.main, which are given behind -- and are read here too.
FLAGS = flags.FlagValues()


def define_flags() -> None:
    """Defines every flag that comes before --."""
    flags.DEFINE_integer("num_workers", None, "How many workers.", lower_bound=1, flag_values=FLAGS)
    flags.DEFINE_integer(
        "num_ps",
        0,
        "How many parameter servers. With any there is also a process more, the chief, which is "
        "the first.",
        lower_bound=0,
        flag_values=FLAGS,
    )
    flags.DEFINE_integer(
        "max_restarts",
        0,
        "How often all processes are started again when one has died; a worker of parameter "
        "servers alone.",
        lower_bound=0,
        flag_values=FLAGS,
    )
    flags.DEFINE_float(
        "grace_seconds",
        5.0,
        "Time between SIGTERM and SIGKILL for the processes that have to end since one died.",
        lower_bound=0,
        flag_values=FLAGS,
    )
    flags.DEFINE_enum(
        "pin",
        "none",
        PINS,
        "cores: each worker has as many of the cores that this process may use, and as many "
        "threads. gpus: each worker has one GPU, and other processes have none.",
        flag_values=FLAGS,
    )
    flags.DEFINE_string(
        "log_dir",
        None,
        "Where all but the first process write: worker-1.log, …. By default the folder logs in "
        "--model_dir, else a new temporary one.",
        flag_values=FLAGS,
    )
    flags.DEFINE_bool(
        "live", False, "Show what they write on the screen as well.", flag_values=FLAGS
    )


def run(argv: Sequence[str] | None = None) -> None:
    """The command `ddl-launch`: parses flags, runs, and exits with a status documented above."""
    arguments = list(sys.argv if argv is None else argv)
    if asks_for_help(arguments):
        print(f"{__doc__}\nFlags:\n{FLAGS.get_help()}")
        sys.exit(0)
    try:
        cluster = build_cluster(arguments)
    except (flags.Error, ConfigError) as error:
        print(
            f"ddl-launch: {error}\n"
            "ddl-launch --help lists the flags before --, ddl --help those after it.",
            file=sys.stderr,
        )
        sys.exit(1)
    try:
        sys.exit(cluster.run())
    except DdlError as error:
        print(f"ddl-launch: {error}", file=sys.stderr)
        sys.exit(error.exit_status)


def build_cluster(arguments: Sequence[str]) -> Cluster:
    """What the command line describes.

    Raises:
      flags.Error: If a flag is wrong, on either side of --.
      ConfigError: If there are not enough cores or GPUs.
    """
    if not sys.platform.startswith("linux"):
        raise ConfigError("several processes are started and watched on Linux alone")
    own, of_main = split(arguments)
    parse(FLAGS, own)
    # Read here too, so that a mistyped one is told once and before anything is started.
    parse(MAIN_FLAGS, with_aliases([arguments[0], *of_main]))
    if FLAGS.num_workers is None:
        needed = f", which --num_ps={FLAGS.num_ps} needs" if FLAGS.num_ps else ""
        raise flags.Error(f"--num_workers is missing{needed}: say how many, such as 2")
    # One process alone has the strategy that its devices call for.
    strategy = strategy_of_cluster(FLAGS.num_workers, has_servers=FLAGS.num_ps > 0)
    if strategy is not None and not MAIN_FLAGS["strategy"].present:
        of_main = [*of_main, f"--strategy={strategy}"]
    return Cluster(
        [sys.executable, "-m", "ddl.main", *of_main],
        FLAGS.num_workers,
        FLAGS.num_ps,
        max_restarts=FLAGS.max_restarts,
        grace_seconds=FLAGS.grace_seconds,
        pin=FLAGS.pin,
        log_dir=FLAGS.log_dir or log_dir_of_run(),
        live=FLAGS.live,
    )


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments before --, with the program's name, and those after it."""
    place = arguments.index("--") if "--" in arguments else len(arguments)
    own, of_main = list(arguments[:place]), list(arguments[place + 1 :])
    if not of_main:
        raise flags.Error(
            "the flags of ddl.main are missing: give them after --, such as "
            "-- --gin_file=configs/digits_cnn.gin --model_dir=runs/digits"
        )
    return own, of_main


def log_dir_of_run() -> Path | None:
    """The folder for logs in --model_dir, if there is one and this run may write there."""
    model_dir = MAIN_FLAGS.model_dir
    if model_dir is None or "://" in model_dir or MAIN_FLAGS.dry_run:
        return None
    return Path(model_dir) / "logs"


define_flags()

if __name__ == "__main__":
    run()
