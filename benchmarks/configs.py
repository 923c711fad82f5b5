"""Accuracy of the configs: python -m benchmarks.configs.

Each config whose data come with ddl is trained by the command in its header, in a process of its
own. The table compares the last evaluation with the figure that the header states. A figure should
lie within a tolerance of the nearest one stated: 0.6 percent points of an accuracy, which are two
of 360 test digits, and 0.02 of a loss, an error in kilograms, or a score between 0 and 1.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks import harness
from benchmarks.harness import ROOT, Cell, Options, Report, Table, Target

POINTS, SCORES = 0.6, 0.02
QUICK = ("TRAIN_STEPS = 20", "LOG_EVERY = 10", "CHECKPOINT_EVERY = 20", "EVAL_EVERY = 10")


STATED = (
    ("digits_mlp", "accuracy", "98.3%"),
    ("digits_cnn", "accuracy", "98.6% or 98.9%"),
    ("digits_cnn_regularized", "accuracy", "98.3% or 98.6%"),
    ("penguins_body_mass", "mean_absolute_error", "0.26"),
    ("penguins_body_mass", "r2", "0.81"),
    ("shapes_multi_label", "mean_average_precision", "0.98"),
    ("shapes_multi_label", "f1_macro", "0.94"),
    ("shapes_multi_label", "exact_match", "81.6% or 80.6%"),
    ("play_gpt", "loss", "1.75"),
    ("play_bert", "loss", "1.77"),
    ("play_bert", "accuracy", "48.4% or 49.2%"),
)
"""Config, metric in `metrics.jsonl`, and its figure in the header of the config, or several where
processors round differently. A text that ends with % is a share of 1, in percent."""


def commands_of(config: Path) -> list[list[str]]:
    """Returns the commands in the header of a config; the last one trains it."""
    header = re.match(r"(?:#.*\n)+", config.read_text())
    text = re.sub(r"\\\n#", " ", header[0] if header else "")
    found = re.findall(r"^# +(python -m ddl\.main .*)$", text, re.MULTILINE)
    own = f"/{config.name}"
    # Some headers name the command of their own config first, and what has to run before later.
    return sorted(map(shlex.split, found), key=lambda flags: any(own in flag for flag in flags))


def evaluations(config: str, quick: bool) -> list[dict[str, float]]:
    """Runs the commands of a header, such as that of configs/digits_mlp.gin, in a new folder.

    Returns:
      The evaluations of the training, as lines of `metrics.jsonl`.

    Raises:
      RuntimeError: If one fails, with the end of its output.
    """
    with tempfile.TemporaryDirectory(prefix="configs") as folder:
        for name in ("configs", "examples"):
            (Path(folder) / name).symlink_to(ROOT / name)
        for command in commands_of(ROOT / config):
            params = [f"--gin_param={param}" for param in QUICK] if quick else []
            _start([*command, *params], folder)
        (model_dir,) = (flag for flag in command if flag.startswith("--model_dir="))
        text = (Path(folder) / model_dir.partition("=")[2] / "metrics.jsonl").read_text()
        lines = map(json.loads, text.splitlines())
        return [line for line in lines if line["split"] == "eval"]


def _start(command: Sequence[str], folder: str) -> None:
    given = {"env": {**os.environ, "PYTHONPATH": str(ROOT)}, "cwd": folder, "text": True}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run([sys.executable, *command[1:]], **given, **pipes, check=False)  # type: ignore[call-overload]
    if done.returncode:
        text = f"{shlex.join(command)} ended with status {done.returncode}:"
        raise RuntimeError(f"{text}\n{done.stdout[-2000:]}")


def distance(stated: str, measured: float) -> float:
    """Returns how far a measured figure is from the nearest one stated, in tolerances."""
    distances = []
    for text in stated.split(" or "):
        if text.endswith("%"):
            distances.append(abs(100 * measured - float(text[:-1])) / POINTS)
        else:
            distances.append(abs(measured - float(text)) / SCORES)
    return min(distances)


def measure(options: Options) -> Report:
    """Trains the configs, one after the other."""
    rows: list[list[Cell]] = []
    distances = {}
    for config in options.chosen(dict.fromkeys(name for name, *_ in STATED)):
        last = evaluations(f"configs/{config}.gin", options.quick)[-1]
        for metric, text in (rest for name, *rest in STATED if name == config):
            measured, figure = last[metric], metric.replace("_", " ")
            shown = f"{100 * measured:.1f}%" if text.endswith("%") else f"{measured:.3f}"
            rows.append([config, figure, text, shown])
            distances[f"{config}: {figure}"] = distance(text, measured)
    columns = ["config", "figure", "the header states", "measured"]
    what = max(distances, key=lambda name: distances[name])
    text = f"farthest figure ({what}), in tolerances"
    target = Target(text, distances[what], 1, "at most")
    return Report([Table("Last evaluations", columns, rows)], [target])


if __name__ == "__main__":
    harness.main(measure)
