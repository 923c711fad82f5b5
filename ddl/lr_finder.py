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

import json
import sys
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

try:
    from absl import flags

    from ddl.checkpoints.durable_files import write_atomically
    from ddl.cli.commands import exiting_on_errors, parse_command_line
    from ddl.cli.flags import FLAGS as MAIN_FLAGS
    from ddl.cli.flags import OF_CONFIG, parse_gpus, share
    from ddl.cli.placing import build_placement
    from ddl.errors import ConfigError, installing
except KeyboardInterrupt:  # else Python prints a traceback
    sys.exit(130)

if TYPE_CHECKING:
    from ddl.run.range_test import RangeTestResult

FLAGS = flags.FlagValues()

# Flags of ddl.main that define the computation, and where it runs.
_OF_MAIN = (
    *OF_CONFIG,
    *("strategy", "num_virtual_devices", "virtual_gpu_memory"),
    *("gpus", "memory_growth", "deterministic_ops", "tf32", "jit_compile"),
    *("cross_device_ops", "num_packs", "bytes_per_pack", "data_on_device"),
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
    gpus = parse_command_line("ddl.lr_finder", __doc__, FLAGS, argv, lambda: parse_gpus(FLAGS.gpus))
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
    from ddl.training.device_errors import device_errors
    from ddl.user_code import attributing_errors

    test = RangeTest(FLAGS.smallest, FLAGS.largest, FLAGS.steps)
    with attributing_errors(user_packages()), device_errors():
        _, trainer = train.build(placement, Workers(placement.strategy))
        for line in config.check_all_used(FLAGS.gin_allow_unused):
            print(line)
        learning_rate = rate_without_plateau(only_optimizer(trainer))
        factor = learning_rate.factor if isinstance(learning_rate, LearningRate) else 1.0
        batch = next(iter(trainer.pipelines.values())).global_batch_size
        result = test.run(trainer)
    print(text_plot(result))
    print("\n".join(suggestion(result, batch, factor)))
    if FLAGS.output:
        print(f"Wrote {' and '.join(map(str, write(result, batch, Path(FLAGS.output))))}.")


def suggestion(result: "RangeTestResult", batch: int, factor: float) -> list[str]:
    """Returns lines with the result of the test and the suggested learning rate.

    Args:
      result: The result of the test.
      batch: The global batch size.
      factor: The factor of the scaling rule; 1 without one.
    """
    reached = f"{result.rates[-1]:.3g}"
    lines = [
        f"The test made {len(result.rates)} updates of batch size {batch:,}. The learning rate "
        f"grew from {result.rates[0]:.3g} to {reached}"
        + (", where training diverged." if result.diverged else "; training did not diverge.")
    ]
    if result.steepest is None:
        return [
            *lines,
            "There is no suggestion, since the loss did not fall. Pass other values of --smallest "
            "and --largest.",
        ]
    lines.append(
        f"Suggestion: a peak learning rate of {result.steepest:.2g}, where the smoothed loss falls "
        f"fastest. The loss is smallest at {result.at_least_loss:.2g}; stay below that rate."
    )
    if factor != 1:
        base = result.steepest / factor
        lines.append(f"With the scaling rule (× {factor:g}), set LEARNING_RATE = {base:.2g}.")
    return lines


def text_plot(result: "RangeTestResult", rows: int = 12, columns: int = 64) -> str:
    """Returns a plot of the smoothed loss over the logarithm of the rate."""
    smoothed = result.smoothed
    places = [round(i * (len(smoothed) - 1) / (columns - 1)) for i in range(columns)]
    low = smoothed.min()
    height = (result.upper_axis_limit - low) or 1.0
    level = [min(rows - 1, round((smoothed[p] - low) / height * (rows - 1))) for p in places]
    lines = []
    for row in range(rows - 1, -1, -1):
        label = f"{low + height * row / (rows - 1):8.3f} |"
        lines.append(label + "".join("*" if one == row else " " for one in level).rstrip())
    first, last = f"{result.rates[0]:.1e}", f"{result.rates[-1]:.1e}"
    lines.append(" " * 9 + "+" + "-" * columns)
    lines.append(" " * 10 + first + "learning rate".center(columns - 2 * len(first)) + last)
    return "\n".join(lines)


def write(result: "RangeTestResult", batch: int, folder: Path) -> list[Path]:
    """Writes the table and, with matplotlib, the plot, each whole or not at all.

    Raises:
      ConfigError: If they cannot be written.
    """
    table = json.dumps({"global_batch_size": batch, **result.to_dict()}, indent=1) + "\n"
    contents: dict[str, str | bytes] = {"range_test.json": table}
    if (picture := draw(result)) is not None:
        contents["range_test.png"] = picture
    else:
        print(f"No picture is written, since matplotlib is missing. {installing('plots')}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            write_atomically(folder / name, content)
    except OSError as error:
        raise ConfigError(
            f"--output={folder} cannot be written: {error}. Pass another folder."
        ) from error
    return [folder / name for name in contents]


def draw(result: "RangeTestResult") -> bytes | None:
    """Returns the plot as PNG; None without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.semilogx(result.rates, result.losses, color="0.8", label="loss of a batch")
    axes.semilogx(result.rates, result.smoothed, color="tab:blue", label="smoothed")
    if result.steepest is not None:
        axes.axvline(result.steepest, color="tab:red", label=f"steepest: {result.steepest:.2g}")
    low, high = float(result.losses.min()), result.upper_axis_limit
    margin = 0.05 * (high - low) or 1.0
    axes.set(xlabel="learning rate", ylabel="loss", ylim=(low - margin, high + margin))
    axes.legend()
    content = BytesIO()
    figure.savefig(content, format="png", dpi=150)
    return content.getvalue()


define_flags()

if __name__ == "__main__":
    run()
