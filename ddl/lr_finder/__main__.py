"""Command that makes a learning rate range test (Smith 2017).

  python -m ddl.lr_finder --gin_file=configs/digits_cnn.gin --output=runs/range_test

The test trains the config's model from fresh weights, with the config's batch size and optimizer,
while the learning rate grows until training diverges. The command prints a plot of the losses and
suggests a learning rate. With --output it also writes the table as JSON and, if the extra `plots`
is installed, a picture. The test is not a run: it reads and writes no --model_dir, saves no
weights, and cannot be resumed.

Exit status:
  0    Done.
  1    The flags, the config, the data or a module of the config have an error.
  70   Any other error: a bug, shown with its traceback, or a failure of the system.
  130  The command was interrupted.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

try:
    from absl import flags

    from ddl.cli.commands import exiting_on_errors, parse_command_line
    from ddl.cli.flags import FLAGS as MAIN_FLAGS
    from ddl.cli.flags import OF_CONFIG, parse_gpus, share
    from ddl.cli.placing import build_placement
    from ddl.lr_finder.results import suggestion, text_plot, write
    from ddl.output import printable
except KeyboardInterrupt:  # else Python prints a traceback
    sys.exit(130)

FLAGS = flags.FlagValues()

# Flags of ddl.main that define the computation, and where it runs.
_OF_MAIN = (
    *OF_CONFIG,
    *("strategy", "num_virtual_devices", "virtual_gpu_memory"),
    *("gpus", "memory_growth", "deterministic_ops", "tf32", "jit_compile"),
    *("cross_device_ops", "num_packs", "bytes_per_pack", "data_on_device"),
    *("shard_optimizer_state", "shard_gradients"),
)


def define_flags() -> None:
    """Defines every flag of the command line."""
    share(FLAGS, _OF_MAIN)
    flags.DEFINE_string("output", None, "Folder for the table and the plot.", flag_values=FLAGS)
    flags.DEFINE_float("smallest", 1e-6, "Learning rate of the first update.", flag_values=FLAGS)
    flags.DEFINE_float("largest", 10.0, "Learning rate of the last update.", flag_values=FLAGS)
    flags.DEFINE_integer("steps", 200, "Maximum number of updates.", flag_values=FLAGS)


def run(argv: Sequence[str] | None = None) -> None:
    """Runs the command, and exits with a status documented above.

    Args:
      argv: The program's name, then the arguments; None takes those of this process.
    """
    gpus = parse_command_line("ddl lr_finder", __doc__, FLAGS, argv, lambda: parse_gpus(FLAGS.gpus))
    MAIN_FLAGS.mark_as_parsed()
    with exiting_on_errors():
        find(gpus)


def find(gpus: Sequence[int] | None) -> None:
    """Makes the test that the parsed flags describe, and prints the plot and the suggestion.

    Args:
      gpus: Indices of the GPUs to use; None means all.
    """
    MAIN_FLAGS.cluster = "none"  # the test runs in one process, whatever TF_CONFIG says
    placement = build_placement(gpus)
    assert placement is not None  # only a parameter server gets None

    from ddl import config
    from ddl.config.registry import user_packages
    from ddl.distribution.workers import Workers
    from ddl.optimizers.learning_rate import LearningRate
    from ddl.optimizers.plateau import rate_without_plateau
    from ddl.run import train
    from ddl.run.range_test import RangeTest, only_optimizer
    from ddl.training.loop.device_errors import device_errors
    from ddl.user_code import attributing_errors

    test = RangeTest(FLAGS.smallest, FLAGS.largest, FLAGS.steps)
    with attributing_errors(user_packages()), device_errors():
        _, trainer = train.build(placement, Workers(placement.strategy))
        for line in config.check_all_used(FLAGS.gin_allow_unused):
            print(printable(line))
        learning_rate = rate_without_plateau(only_optimizer(trainer))
        factor = learning_rate.factor if isinstance(learning_rate, LearningRate) else 1.0
        batch = next(iter(trainer.pipelines.values())).global_batch_size
        result = test.run(trainer)
    print(text_plot(result))
    print("\n".join(suggestion(result, batch, factor)))
    if FLAGS.output:
        print(f"Wrote {' and '.join(map(str, write(result, batch, Path(FLAGS.output))))}.")


define_flags()

if __name__ == "__main__":
    run()
