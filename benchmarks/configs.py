"""What the configs learn: python -m benchmarks configs.

Each config whose data come with ddl is trained by the command in its header, in a process of its
own. The table compares the last evaluation with the figure that the header states. A figure should
lie within a tolerance of the nearest one stated: 0.6 percent points of an accuracy, which are two
of 360 test digits, and 0.02 of a loss, an error in kilograms, or a score between 0 and 1. The
seconds are those of the whole command, with the import of TensorFlow, tracing, evaluations and
checkpoints.
"""

import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from benchmarks import command
from benchmarks.example_runs import Runs
from benchmarks.report import Bar, Cell, Report, Table

POINTS = 0.6
SCORES = 0.02


class Stated(NamedTuple):
    """A figure that the header of a config states.

    Attributes:
      config: File name of the config.
      metric: Name of the metric in `metrics.jsonl`.
      texts: The figures as they are written in the header; several where processors round
        differently. A text that ends with % is a share of 1, in percent.
      params: Values of `--gin_param` that the header gives for this figure.
    """

    config: str
    metric: str
    texts: Sequence[str]
    params: Sequence[str] = ()


STATED = (
    Stated("digits_mlp.gin", "accuracy", ["98.3%"]),
    Stated("digits_cnn.gin", "accuracy", ["98.9%"]),
    Stated("digits_cnn_lars.gin", "accuracy", ["98.6%"]),
    Stated("digits_cnn_regularized.gin", "accuracy", ["99.2%", "99.4%"]),
    Stated("digits_resnet_goyal.gin", "accuracy", ["98.3%", "99.2%"]),
    Stated("digits_vit.gin", "accuracy", ["95.3%"]),
    Stated("digits_resnet18.gin", "accuracy", ["98.1%"]),
    Stated("penguins_body_mass.gin", "mean_absolute_error", ["0.26"]),
    Stated("penguins_body_mass.gin", "r2", ["0.81"]),
    Stated("penguins_species.gin", "accuracy", ["all 67"]),
    Stated("penguins_sex.gin", "accuracy", ["88.1%"]),
    Stated("penguins_sex.gin", "hinge", ["0.34"]),
    Stated("shapes_multi_label.gin", "mean_average_precision", ["0.95"]),
    Stated("shapes_multi_label.gin", "f1_macro", ["0.90"]),
    Stated("shapes_multi_label.gin", "exact_match", ["70%"]),
    Stated("play_gpt.gin", "loss", ["1.75"]),
    Stated("play_bert.gin", "loss", ["1.75"]),
    Stated("play_bert.gin", "accuracy", ["49.8%"]),
)


def distance(stated: Stated, measured: float) -> float:
    """Returns how far a measured figure is from the nearest one stated, in tolerances."""
    distances = []
    for text in stated.texts:
        if text.endswith("%"):
            distances.append(abs(100 * measured - float(text[:-1])) / POINTS)
        else:
            value = 1.0 if text.startswith("all ") else float(text)
            distances.append(abs(measured - value) / SCORES)
    return min(distances)


def shown(stated: Stated, measured: float) -> str:
    """Returns a measured figure in the unit of the header."""
    is_share = stated.texts[0].endswith("%") or stated.texts[0].startswith("all ")
    return f"{100 * measured:.1f}%" if is_share else f"{measured:.3f}"


def report(rows: Sequence[Sequence[Cell]], farthest: tuple[str, float]) -> Report:
    """Returns the report of the configs so far."""
    columns = ["config", "figure", "the header states", "measured", "seconds"]
    what, value = farthest
    bar = Bar(f"farthest figure ({what}), in tolerances", value, 1, "at most")
    return Report([Table("Last evaluations", columns, rows)], [bar])


def measure(quick: bool) -> Iterator[Report]:
    """Trains the configs, one after the other."""
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(Path(folder), quick)
        rows: list[Sequence[Cell]] = []
        farthest = ("", -1.0)
        for stated in STATED:
            run = runs(f"configs/{stated.config}", *stated.params)
            measured = run.lines("eval")[-1][stated.metric]
            name = ", ".join([stated.config, *stated.params])
            figure = stated.metric.replace("_", " ")
            rows.append(
                [name, figure, " or ".join(stated.texts), shown(stated, measured), run.seconds]
            )
            away = distance(stated, measured)
            if away > farthest[1]:
                farthest = (f"{name}: {figure}", away)
            yield report(rows, farthest)


if __name__ == "__main__":
    command.main(measure)
