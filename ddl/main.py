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
import signal
from collections.abc import Sequence
from contextlib import nullcontext

from absl import flags

from ddl.cli.commands import exiting_on_errors, leave, parse
from ddl.cli.flags import check_flags, checkpoint_of, main_flags, profile_of
from ddl.cli.placing import build_placement


def run(argv: Sequence[str] | None = None) -> None:
    """Runs the command `ddl train`, and exits with a status documented above.

    Args:
      argv: The program's name, then the arguments; None takes those of this process.
    """
    with exiting_on_errors("ddl"):
        values = main_flags()
        parse(values, argv, __doc__)
        check_flags(values)
        # Stacks of all threads on standard error, even while the main thread waits in TensorFlow.
        faulthandler.register(signal.SIGQUIT, file=2, all_threads=True)
        start(values)


def start(values: flags.FlagValues) -> None:
    """Sets up the devices as the parsed flags say, and runs.

    Raises:
      DdlError: If the config, the devices, the data or the model directory cannot be used, or the
        run ends before its last step.
    """
    placement = build_placement(values)
    if placement is None:  # a parameter server or its worker has served
        # TensorFlow's own exit may take longer than the launcher waits, and nothing is to be saved.
        leave(0)

    from ddl.config.registry import user_packages
    from ddl.distribution.multi_worker import leaving, worker_errors
    from ddl.distribution.traits import traits_of
    from ddl.errors import attributing_errors
    from ddl.run import train
    from ddl.training.device_errors import device_errors

    losses = worker_errors() if traits_of(placement.strategy).several_processes else nullcontext()
    with leaving(), attributing_errors(user_packages()), losses, device_errors():
        train.run(
            placement,
            values.model_dir,
            mode=values.mode,
            dry_run=values.dry_run,
            allow_unused=values.gin_allow_unused,
            checkpoint=checkpoint_of(values),
            follow_timeout=values.follow_timeout,
            profile=profile_of(values),
            predictions=values.predictions,
        )


if __name__ == "__main__":
    run()
