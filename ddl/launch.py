"""Command that starts and watches a cluster on this machine: several processes of ddl.main.

  python -m ddl.launch --num_workers=2 -- --gin_file=configs/digits_cnn.gin --model_dir=runs/digits

The arguments after -- are flags of ddl.main; the launcher adds --strategy if it is not among them.
Each process reads its task from TF_CONFIG. The launcher shows the output of the first process, and
writes the output of the others to log files. If a process dies, the launcher stops the others. It
passes SIGTERM and SIGINT on to all processes; a second signal kills them.

With --max_restarts the launcher restarts all processes from the last checkpoint, except after
status 76, status 1 or a signal to stop. With parameter servers it restarts a dead worker alone,
while the others continue.

The exit status is the worst one of the processes, without those that the launcher stopped. From
the worst to the best:
  128 + N  A process was killed by signal N.
  76       Training diverged.
  1        The flags, the config, the data or your own code have an error.
  70       Or any other status: a bug, a failure of the system, or another run trains in the
           model directory.
  77       A process lost another one.
  75       Training stopped on a signal and can be resumed.
  0        Done.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

try:
    from absl import flags

    from ddl.choices import PINS
    from ddl.cli.arguments import asks_for_help, parse, with_aliases
    from ddl.cli.commands import exiting_on_errors
    from ddl.cli.flags import FLAGS as MAIN_FLAGS
    from ddl.distribution.traits import strategy_of_cluster
    from ddl.errors import ConfigError
    from ddl.launcher.cluster import Cluster
    from ddl.output import protect_standard_streams, say
except KeyboardInterrupt:  # else Python prints a traceback
    sys.exit(130)

# Separate from the flags of ddl.main, which follow -- and are parsed here too.
FLAGS = flags.FlagValues()


def define_flags() -> None:
    """Defines every flag that comes before --."""
    flags.DEFINE_integer(
        "num_workers", None, "Number of workers.", lower_bound=1, flag_values=FLAGS
    )
    flags.DEFINE_integer(
        "num_ps",
        0,
        "Number of parameter servers. With at least one, the launcher also starts a chief, which "
        "is the first process.",
        lower_bound=0,
        flag_values=FLAGS,
    )
    flags.DEFINE_integer(
        "max_restarts",
        0,
        "Maximum number of restarts after a process died. A restart is one of all processes, or, "
        "with parameter servers, of a worker alone.",
        lower_bound=0,
        flag_values=FLAGS,
    )
    flags.DEFINE_float(
        "grace_seconds",
        5.0,
        "Seconds between SIGTERM and SIGKILL for the processes that the launcher stops.",
        lower_bound=0,
        flag_values=FLAGS,
    )
    flags.DEFINE_enum(
        "pin",
        "none",
        PINS,
        "Pin each worker to an equal share of the available cores, with as many threads, or to "
        "one GPU. With gpus, a chief and parameter servers get no GPU.",
        flag_values=FLAGS,
    )
    flags.DEFINE_string(
        "log_dir",
        None,
        "Folder for the logs worker-1.log, … of all processes but the first. The default is the "
        "folder logs in --model_dir, or a new temporary folder if there is no --model_dir.",
        flag_values=FLAGS,
    )
    flags.DEFINE_bool("live", False, "Also print the logs as they grow.", flag_values=FLAGS)


def run(argv: Sequence[str] | None = None) -> None:
    """Runs the command `ddl-launch`, and exits with a status documented above.

    Args:
      argv: The program's name, then the arguments; None takes those of this process.
    """
    arguments = list(sys.argv if argv is None else argv)
    protect_standard_streams("ddl-launch")
    if asks_for_help(arguments):
        print(f"{__doc__}\nFlags:\n{FLAGS.get_help()}")
        sys.exit(0)
    with exiting_on_errors():
        try:
            cluster = build_cluster(arguments)
        except (flags.Error, ConfigError) as error:
            say(
                f"{error}\n"
                "Run ddl-launch --help for the flags before --, and ddl train --help for those "
                "after it."
            )
            sys.exit(1)
        sys.exit(cluster.run())


def build_cluster(arguments: Sequence[str]) -> Cluster:
    """Returns the cluster that the command line describes.

    Raises:
      flags.Error: If a flag is wrong, on either side of --.
      ConfigError: If there are not enough cores or GPUs.
    """
    if not sys.platform.startswith("linux"):
        raise ConfigError(
            f"ddl-launch requires Linux, got {sys.platform}. Start each process of ddl.main "
            "yourself, with its TF_CONFIG."
        )
    own, of_main = split(arguments)
    parse(FLAGS, own)
    # Parse these flags here too, to report a mistyped one once and before any process starts.
    parse(MAIN_FLAGS, with_aliases([arguments[0], *of_main]))
    if FLAGS.num_workers is None:
        servers = f" with --num_ps={FLAGS.num_ps}" if FLAGS.num_ps else ""
        raise flags.Error(
            f"--num_workers is required{servers}. Pass a number, such as --num_workers=2."
        )
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
    """Splits the arguments into those before --, with the program's name, and those after it.

    Raises:
      flags.Error: If none follows --.
    """
    place = arguments.index("--") if "--" in arguments else len(arguments)
    own, of_main = list(arguments[:place]), list(arguments[place + 1 :])
    if not of_main:
        raise flags.Error(
            "The flags of ddl.main are missing. Pass them after --, such as "
            "-- --gin_file=configs/digits_cnn.gin --model_dir=runs/digits."
        )
    return own, of_main


def log_dir_of_run() -> Path | None:
    """Returns the folder for logs in --model_dir; None if the run cannot write logs there."""
    model_dir = MAIN_FLAGS.model_dir
    if model_dir is None or "://" in model_dir or MAIN_FLAGS.dry_run:
        return None
    return Path(model_dir) / "logs"


define_flags()

if __name__ == "__main__":
    run()
