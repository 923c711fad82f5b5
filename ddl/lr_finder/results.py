"""The result of a learning rate range test, as text, table and picture."""

import json
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from ddl.checkpoints.durable_files import write_atomically
from ddl.errors import ConfigError, installing

if TYPE_CHECKING:
    from ddl.run.range_test import RangeTestResult


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
