"""Trains, evaluates or exports the experiment that gin files describe.

  python -m ddl.main --gin_file=configs/digits_cnn.gin --model_dir=runs/digits

gin files say what is computed, the other flags where it runs. The same command again goes on
where the run stopped. Exit status: 0 done; 1 an error in flags, config or data; 75 stopped by a
signal after saving; 76 training diverged; 77 another worker of the cluster was lost; 70 anything
else: a bug, with its traceback, or the system's doing; 130 interrupted before training, or in an
evaluation or an export.
"""

import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import nullcontext, suppress

from absl import flags

from ddl.cli.arguments import asks_for_help, parse, with_aliases
from ddl.cli.flags import (
    FLAGS,
    check_flags_fit_mode,
    list_of_flags,
    parse_checkpoint,
    parse_gpus,
)
from ddl.cli.placing import build_placement
from ddl.errors import UNEXPECTED_STATUS, DdlError, WorkerLost


def run(argv: Sequence[str] | None = None) -> None:
    """The command `ddl`: parses flags, runs, and exits with the status documented above."""
    arguments = with_aliases(sys.argv if argv is None else argv)
    if asks_for_help(arguments):
        print(f"{__doc__}\nFlags:\n{list_of_flags()}")
        sys.exit(0)
    try:
        parse(FLAGS, arguments)
        if not FLAGS.gin_file:
            raise flags.Error(
                "--gin_file is missing: name a config, such as configs/digits_cnn.gin"
            )
        if FLAGS.model_dir is None and not FLAGS.dry_run:
            raise flags.Error("--model_dir is missing: name a directory for what the run writes")
        gpus = parse_gpus(FLAGS.gpus)
        checkpoint = parse_checkpoint(FLAGS.checkpoint)
        check_flags_fit_mode()
    except flags.Error as error:
        print(f"ddl: {error}\nddl --help lists all flags.", file=sys.stderr)
        sys.exit(1)
    try:
        start(gpus, checkpoint)
    except DdlError as error:
        print(f"ddl: {error}", file=sys.stderr, flush=True)
        if isinstance(error, WorkerLost):  # TensorFlow's own end would wait for the lost one
            sys.stdout.flush()
            os._exit(error.exit_status)
        sys.exit(error.exit_status)
    except KeyboardInterrupt:  # before training begins, or in an evaluation or an export
        print("ddl: interrupted", file=sys.stderr)
        sys.exit(130)
    except Exception:  # all was written that could be; TensorFlow's own end may wait for others
        traceback.print_exc()
        with suppress(OSError):  # nobody may read it any more
            sys.stdout.flush()
        os._exit(UNEXPECTED_STATUS)


def start(gpus: Sequence[int] | None, checkpoint: str | int) -> None:
    """From parsed flags to the end of the run."""
    placement = build_placement(gpus)
    if placement is None:
        return

    from ddl.distribution.multi_worker import leaving, worker_errors
    from ddl.distribution.traits import traits_of
    from ddl.run import train
    from ddl.run.from_checkpoints import SavedWeights

    several_processes = traits_of(placement.strategy).several_processes
    with leaving(), worker_errors() if several_processes else nullcontext():
        train.run(
            placement,
            FLAGS.model_dir,
            mode=FLAGS.mode,
            dry_run=FLAGS.dry_run,
            allow_unused=FLAGS.gin_allow_unused,
            saved_weights=SavedWeights(checkpoint, FLAGS.averaged_weights),
            follow_timeout=FLAGS.follow_timeout,
        )


if __name__ == "__main__":
    run()
