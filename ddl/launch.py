"""Command that starts and watches a cluster on this machine: several processes of ddl.main.

  python -m ddl.launch --num_workers=2 -- --gin_file=configs/digits_cnn.gin --model_dir=runs/digits

The arguments after -- are flags of ddl.main. Each process reads its task from TF_CONFIG, from which
--strategy=auto chooses the strategy. The first process writes to the terminal as ddl.main does. The
output of the others goes to standard error, with the process before each line. If a process dies,
the launcher stops the others. It passes SIGTERM and SIGINT on to all processes; a second signal
kills them.

With --max_restarts the launcher restarts all processes from the last checkpoint, except after
status 76, status 1 or a signal to stop. It restarts them as long as the step of the newest
checkpoint grows, and that many times without a newer checkpoint. With parameter servers it restarts
a dead worker alone, while the others continue.

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

from absl import flags

from ddl.cli.commands import exiting_on_errors, parse
from ddl.cli.flags import check_flags, launch_flags, main_flags
from ddl.errors import ConfigError
from ddl.launcher.cluster import Cluster


def run(argv: Sequence[str] | None = None) -> None:
    """Runs the command `ddl launch`, and exits with a status documented above.

    Args:
      argv: The program's name, then the arguments; None takes those of this process.
    """
    with exiting_on_errors("ddl launch"):
        sys.exit(build_cluster(sys.argv if argv is None else argv).run())


def build_cluster(arguments: Sequence[str]) -> Cluster:
    """Returns the cluster that the command line describes.

    Raises:
      flags.Error: If a flag is missing or wrong, on either side of --.
      ConfigError: If there are too few GPUs, CUDA_VISIBLE_DEVICES is wrong, or this is not Linux.
    """
    place = arguments.index("--") if "--" in arguments else len(arguments)
    own, of_main = launch_flags(), arguments[place + 1 :]
    parse(own, arguments[:place], __doc__)
    if not of_main:
        raise flags.Error(
            "The flags of ddl.main are missing. Pass them after --, such as "
            "-- --gin_file=configs/digits_cnn.gin --model_dir=runs/digits."
        )
    if own.num_workers is None:
        raise flags.Error("--num_workers is required. Pass a number, such as --num_workers=2.")
    # These are checked here too, to report a wrong one once and before any process starts.
    run_flags = main_flags()
    parse(run_flags, [arguments[0], *of_main], __doc__)
    check_flags(run_flags)
    if not sys.platform.startswith("linux"):
        raise ConfigError(
            f"ddl launch requires Linux, got {sys.platform}. Start each process of ddl.main "
            "yourself, with its TF_CONFIG."
        )
    checkpoints = Path(run_flags.model_dir or "", "checkpoints").expanduser()
    return Cluster(
        [sys.executable, "-m", "ddl.main", *of_main],
        own.num_workers,
        own.num_ps,
        max_restarts=own.max_restarts,
        pin_gpus=own.pin_gpus,
        checkpoints=None if run_flags.dry_run else checkpoints,
    )


if __name__ == "__main__":
    run()
