"""Command that trains, evaluates, exports or predicts with the experiment that gin files describe.

  python -m ddl.main --gin_file=configs/digits_cnn.gin --model_dir=runs/digits

The gin files define the computation; the other flags define where it runs. Run the same command
again to resume a stopped run.

Exit status:
  0    Done.
  1    The flags, the config, the data or a module of the config have an error.
  70   Another process trains in the model directory, or no checkpoint appeared in time. Any other
       error: a bug, shown with its traceback, or a failure of the system.
  75   Training, or --mode=predict, stopped on a signal and can be resumed.
  76   Training diverged.
  77   Another worker of the cluster was lost.
  130  The command was interrupted (SIGINT) before training, with --mode=eval or export, or as
       --mode=predict restored weights or wrote the final file. It can be repeated.
  143  SIGTERM ended the command at such a time: the status that a shell shows for a process that
       the signal ended.
"""

import faulthandler
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import nullcontext

try:
    from absl import flags

    from ddl.cli.commands import exiting_on_errors, parse_command_line
    from ddl.cli.flag_checks import check_flags_fit_mode
    from ddl.cli.flags import FLAGS, parse_checkpoint, parse_gpus, parse_profile
    from ddl.cli.placing import build_placement
except KeyboardInterrupt:  # else Python prints a traceback
    sys.exit(130)


def run(argv: Sequence[str] | None = None) -> None:
    """Runs the command `ddl`, and exits with a status documented above.

    Args:
      argv: The program's name, then the arguments; None takes those of this process.
    """
    gpus, checkpoint = parse_command_line("ddl", __doc__, FLAGS, argv, check_flags)
    # Stacks of all threads on standard error, even while the main thread waits in TensorFlow.
    faulthandler.register(signal.SIGQUIT, file=2, all_threads=True)
    with exiting_on_errors():
        start(gpus, checkpoint)


def check_flags() -> tuple[list[int] | None, str | int]:
    """Checks the parsed flags.

    Returns:
      The GPUs and the checkpoint, as `start` takes them.

    Raises:
      flags.Error: If a flag is missing, wrong or without effect.
    """
    if FLAGS.model_dir is None and not FLAGS.dry_run:
        raise flags.Error(
            "--model_dir is required. Pass a directory for the run, such as "
            "--model_dir=runs/digits, or --dry_run to write nothing."
        )
    gpus, checkpoint = parse_gpus(FLAGS.gpus), parse_checkpoint(FLAGS.checkpoint)
    parse_profile(FLAGS.profile)
    check_flags_fit_mode()
    if FLAGS.profile and FLAGS.dry_run:
        raise flags.Error("--profile has no effect with --dry_run. Leave one of them out.")
    return gpus, checkpoint


def start(gpus: Sequence[int] | None, checkpoint: str | int) -> None:
    """Sets up the devices as the parsed flags say, and runs.

    Args:
      gpus: Indices of the GPUs to use; None means all.
      checkpoint: Checkpoint to evaluate, export or predict with: `latest`, `best`, or a step.
    """
    placement = build_placement(gpus)
    if placement is None:  # a parameter server or its worker has served
        sys.stdout.flush()
        sys.stderr.flush()
        # TensorFlow's own exit may take longer than the launcher waits, and nothing is to be saved.
        os._exit(0)

    from ddl.config.registry import user_packages
    from ddl.distribution.multi_worker import leaving, worker_errors
    from ddl.distribution.traits import traits_of
    from ddl.run import train
    from ddl.run.from_checkpoints import SavedWeights
    from ddl.training.loop.device_errors import device_errors
    from ddl.user_code import attributing_errors

    several_processes = traits_of(placement.strategy).several_processes
    losses = worker_errors() if several_processes else nullcontext()
    with leaving(), attributing_errors(user_packages()), losses, device_errors():
        train.run(
            placement,
            FLAGS.model_dir,
            mode=FLAGS.mode,
            dry_run=FLAGS.dry_run,
            allow_unused=FLAGS.gin_allow_unused,
            saved_weights=SavedWeights(checkpoint, FLAGS.averaged_weights),
            follow_timeout=FLAGS.follow_timeout,
            profile=parse_profile(FLAGS.profile),
            predictions=FLAGS.predictions,
        )


if __name__ == "__main__":
    run()
