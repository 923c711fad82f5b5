"""Finds a learning rate by a range test (Smith 2017): ever larger rates until training diverges.

  python -m ddl.lr_finder --gin_file=configs/digits_cnn.gin --output=runs/range_test

It trains what the config describes from fresh weights, with its batch size and optimizer but a rate
of its own, and saves no weights. It prints the losses as a plot and a rate to begin with;
--output is for the table as JSON and, with the extra `plots`, a picture. It is a command and no
mode of ddl.main, since it makes no run: nothing is gone on with, and no --model_dir is touched.
Exit status: 0 done; 1 an error, with a traceback where nobody foresaw it.
"""

import json
import sys
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from absl import flags

from ddl.checkpoints.durable_files import write_atomically
from ddl.cli.arguments import asks_for_help, parse, with_aliases
from ddl.cli.flags import FLAGS as MAIN_FLAGS
from ddl.cli.flags import parse_gpus
from ddl.cli.placing import build_placement
from ddl.errors import ConfigError, DdlError

if TYPE_CHECKING:
    from ddl.run.range_test import RangeTestResult

FLAGS = flags.FlagValues()

# What is computed, and where, as for ddl.main.
_OF_MAIN = (
    *("gin_file", "gin_param", "gin_bindings", "gin_search_path", "gin_allow_unused"),
    *("strategy", "num_virtual_devices", "gpus", "memory_growth", "deterministic_ops"),
    *("cross_device_ops", "num_packs", "bytes_per_pack", "data_on_device"),
)


def define_flags() -> None:
    """Defines every flag of the command line."""
    for name in _OF_MAIN:
        FLAGS[name] = MAIN_FLAGS[name]
    flags.DEFINE_string("output", None, "A folder for the table and the plot.", flag_values=FLAGS)
    flags.DEFINE_float("smallest", 1e-6, "The rate of the first update.", flag_values=FLAGS)
    flags.DEFINE_float("largest", 10.0, "The rate of the last one.", flag_values=FLAGS)
    flags.DEFINE_integer("steps", 200, "How many updates at most.", flag_values=FLAGS)


def run(argv: Sequence[str] | None = None) -> None:
    """The command: parses flags, makes the test, and exits with a status documented above."""
    arguments = with_aliases(sys.argv if argv is None else argv)
    if asks_for_help(arguments):
        print(f"{__doc__}\nFlags:\n{FLAGS.get_help()}")
        sys.exit(0)
    try:
        parse(FLAGS, arguments)
        if not FLAGS.gin_file:
            raise flags.Error("--gin_file is missing: name a config")
        gpus = parse_gpus(FLAGS.gpus)
    except flags.Error as error:
        print(f"ddl.lr_finder: {error}\n--help lists all flags.", file=sys.stderr)
        sys.exit(1)
    MAIN_FLAGS.mark_as_parsed()
    try:
        find(gpus)
    except DdlError as error:
        print(f"ddl.lr_finder: {error}", file=sys.stderr)
        sys.exit(error.exit_status)


def find(gpus: Sequence[int] | None) -> None:
    """From parsed flags to the suggestion."""
    MAIN_FLAGS.cluster = "none"  # it runs in one process, whatever stands in TF_CONFIG
    placement = build_placement(gpus)
    assert placement is not None  # which it is for a parameter server alone

    from ddl import config
    from ddl.distribution.workers import Workers
    from ddl.optimizers.learning_rate import LearningRate
    from ddl.optimizers.plateau import rate_without_plateau
    from ddl.run import train
    from ddl.run.range_test import RangeTest

    test = RangeTest(FLAGS.smallest, FLAGS.largest, FLAGS.steps)
    _, trainer = train.build(placement, Workers(placement.strategy))
    config.check_all_used(FLAGS.gin_allow_unused)
    learning_rate = rate_without_plateau(trainer.optimizer)
    factor = learning_rate.factor if isinstance(learning_rate, LearningRate) else 1.0
    batch = trainer.global_batch_size
    result = test.run(trainer)
    print(text_plot(result))
    print("\n".join(suggestion(result, batch, factor)))
    if FLAGS.output:
        print(f"written: {', '.join(map(str, write(result, batch, Path(FLAGS.output))))}")


def suggestion(result: "RangeTestResult", batch: int, factor: float) -> list[str]:
    """What to begin with, and how that was found, as lines."""
    reached = f"{result.rates[-1]:.3g}"
    lines = [
        f"{len(result.rates)} updates of batch size {batch:,}; the rate grew from "
        f"{result.rates[0]:.3g} to {reached}"
        + (", where training diverged." if result.diverged else ", without a divergence.")
    ]
    if result.steepest is None:
        return [*lines, "No suggestion: the loss does not fall. Try other --smallest, --largest."]
    lines.append(
        f"Suggestion: a learning rate of {result.steepest:.2g} at its peak, where the smoothed "
        f"loss falls fastest. The loss is least at {result.at_least_loss:.2g}; stay below that."
    )
    if factor != 1:
        base = result.steepest / factor
        lines.append(f"By the scaling rule that is LEARNING_RATE = {base:.2g} (× {factor:g}).")
    return lines


def text_plot(result: "RangeTestResult", rows: int = 12, columns: int = 64) -> str:
    """The smoothed loss over the logarithm of the rate."""
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
        print("no picture: matplotlib is missing (pip install 'ddl[plots]')")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            write_atomically(folder / name, content)
    except OSError as error:
        raise ConfigError(f"--output={folder} cannot be written: {error}") from error
    return [folder / name for name in contents]


def draw(result: "RangeTestResult") -> bytes | None:
    """The plot as PNG; None without matplotlib."""
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
