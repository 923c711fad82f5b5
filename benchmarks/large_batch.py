"""Accuracy of large batches for each recipe: python -m benchmarks large_batch.

Each recipe trains on the same examples: 10 epochs of 60,000 digits, which are the 1,437 training
images included in ddl, shifted by up to a pixel. The test set is 5,000 such images made from the
360 held-out ones. The network is a small CNN with batch normalization. Momentum is 0.9 with
Nesterov's gradient, and the learning rate decays linearly to zero. A warm-up takes the first two
epochs.

Learning rates are tuned on 240 validation images from the training set, with five tries for each
optimizer; the test set selects none. SGD's rate is tuned at batch 64, and the scaling rule alone
gives its rate at other batch sizes. The rates of LARS and LAMB are tuned at batch 1,024 and scaled
by the square root; they are not trained at batch 64. The targets apply to one recipe, the best at
1,024 on the validation images. Figures are means over three seeds; the pictures also show the
range.

Shallue et al. 2019, "Measuring the Effects of Data Parallelism", measure the cost of reaching a
target: the second table counts updates and examples up to the first of twenty evaluations with 98%.

The last table repeats a tutorial on eight GPUs: its CNN with dropout, Adam, 8 epochs, one replica
against eight with the same batch each. Here the batch is 128 on 8 virtual devices, with 10,000
digits of 8 × 8 pixels per epoch and three tries for LAMB's rate. It takes minutes on two cores.

An interrupted benchmark resumes: finished trainings are kept in runs/large_batch.json until all are
done.
"""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np

from benchmarks import command
from benchmarks.moved_digits import data
from benchmarks.report import Bar, Plot, Report, Series, Spread, Table
from benchmarks.trainings import (
    TARGET,
    Cells,
    Outcome,
    Recipe,
    tutorial_cnn,
)
from ddl import distribution
from ddl.optimizers import LAMB, LARS, MomentumSGD

CELLS = Path(__file__).parents[1] / "runs" / "large_batch.json"
BASE_BATCH = 64
# The batch size at which one recipe is chosen.
CHOICE_BATCH = 1024
REPLICAS = 8


@dataclasses.dataclass(frozen=True)
class Search:
    """Learning rates to try with a recipe at one batch size."""

    recipe: str
    batch: int
    rates: Sequence[float]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of the data and of the trainings."""

    examples: int = 60_000
    test_examples: int = 5_000
    epochs: int = 10
    seeds: int = 3
    batches: Sequence[int] = (64, 256, 1024, 2048, 4096)
    tries: int = 5
    tutorial_examples: int = 10_000
    tutorial_tries: int = 3
    tutorial_epochs: int = 8
    tutorial_batch: int = 128


QUICK = Sizes(1024, 512, 1, 1, (64, 1024), 1, 2048, 1, 1, 32)


def _sgd(rate: Any) -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(rate, momentum=0.9, nesterov=True)


def _corrected(rate: Any) -> keras.optimizers.Optimizer:
    return MomentumSGD(rate, momentum=0.9, nesterov=True)


def _lars(rate: Any) -> keras.optimizers.Optimizer:
    return LARS(rate, momentum=0.9, nesterov=True, trust_coefficient=0.02)


RECIPES = {
    "unscaled": Recipe(_sgd, "SGD", "none", False),
    "linear": Recipe(_sgd, "SGD", "linear", False),
    "linear, warm-up": Recipe(_sgd, "SGD", "linear", True),
    "and momentum correction": Recipe(_corrected, "SGD", "linear", True),
    "LARS, warm-up": Recipe(_lars, "LARS", "square_root", True),
    "LAMB, warm-up": Recipe(LAMB, "LAMB", "square_root", True),
}
SEARCHES = {
    "SGD": Search("unscaled", BASE_BATCH, (0.005, 0.01, 0.02, 0.04, 0.08)),
    "LARS": Search("LARS, warm-up", 1024, (0.0625, 0.125, 0.25, 0.5, 1.0)),
    "LAMB": Search("LAMB, warm-up", 1024, (0.005, 0.01, 0.02, 0.04, 0.08)),
}
ADAM = Recipe(keras.optimizers.Adam, "Adam", "none", False)


# ------------------------------------------------------------ the tables


def find_rates(cells: Cells, sizes: Sizes) -> dict[str, tuple[float, int]]:
    """Returns the best rate of each search on the validation images, and its batch size."""
    examples = data(sizes.examples, sizes.test_examples, tuning=True)
    found = {}
    for name, search in SEARCHES.items():
        recipe = RECIPES[search.recipe]
        accuracies = {
            rate: cells(
                f"{search.recipe}, validation",
                *(recipe, search.batch, rate, search.batch, 0, sizes.epochs, examples),
            ).accuracy
            for rate in search.rates[-sizes.tries :]
        }
        found[name] = max(accuracies, key=lambda rate: accuracies[rate]), search.batch
    return found


def choose(cells: Cells, sizes: Sizes, rates: Mapping[str, tuple[float, int]]) -> str:
    """Returns the recipe that is best at 1,024 on the validation images."""
    examples = data(sizes.examples, sizes.test_examples, tuning=True)
    accuracies = {
        name: cells(
            f"{name}, validation",
            *(recipe, CHOICE_BATCH, *rates[recipe.search], 0, sizes.epochs, examples),
        ).accuracy
        for name, recipe in RECIPES.items()
    }
    return max(accuracies, key=lambda name: accuracies[name])


Outcomes = Mapping[tuple[str, int], Sequence[Outcome]]


def compare(cells: Cells, sizes: Sizes, rates: Mapping[str, tuple[float, int]]) -> Outcomes:
    """Trains all recipes at all batch sizes; at 64 only the unscaled one, equal to the linear."""
    examples = data(sizes.examples, sizes.test_examples, tuning=False)
    found: dict[tuple[str, int], list[Outcome]] = {}
    # Seeds are the outer loop, so that an interrupted benchmark has whole tables.
    for seed in range(sizes.seeds):
        for batch in sizes.batches:
            for name, recipe in RECIPES.items():
                if batch == BASE_BATCH and name != "unscaled":
                    continue
                outcome = cells(
                    f"{name}, test",
                    *(recipe, batch, *rates[recipe.search], seed, sizes.epochs, examples),
                )
                found.setdefault((name, batch), []).append(outcome)
    found["linear", BASE_BATCH] = found["unscaled", BASE_BATCH]
    return found


def at_the_edge(rates: Mapping[str, tuple[float, int]], tries: int) -> list[str]:
    """Returns a note for each best rate that is the smallest or largest one tried."""
    notes = []
    for name, (rate, _) in rates.items():
        tried = SEARCHES[name].rates[-tries:]
        if rate in (min(tried), max(tried)):
            which = "smallest" if rate == min(tried) else "largest"
            notes.append(
                f"{name}'s rate is the {which} of those tried; a rate beyond it may be better."
            )
    return notes


def tutorial(cells: Cells, sizes: Sizes) -> Table:
    """Trains one replica, eight with the same rate, and eight with a recipe."""
    small, large = sizes.tutorial_batch, sizes.tutorial_batch * REPLICAS
    rates = (0.02, 0.01, 0.04)[: sizes.tutorial_tries]
    common = {"epochs": sizes.tutorial_epochs, "model": tutorial_cnn, "evaluations": 1}

    def of(tuning: bool) -> tuple[tuple, tuple]:
        return data(sizes.tutorial_examples, sizes.test_examples, tuning)

    lamb = RECIPES["LAMB, warm-up"]
    accuracies = {
        rate: cells(
            "tutorial, LAMB, validation",
            *(lamb, large, rate, large, 0),
            **common,
            examples=of(tuning=True),
            replicas=REPLICAS,
        ).accuracy
        for rate in rates
    }
    best = max(accuracies, key=lambda rate: accuracies[rate])
    rows = []
    for what, recipe, replicas, rate in (
        ("one replica, Adam at 0.001", ADAM, 1, 0.001),
        (f"{REPLICAS} replicas, Adam at 0.001", ADAM, REPLICAS, 0.001),
        (f"{REPLICAS} replicas, LAMB at {best:g} with a warm-up", lamb, REPLICAS, best),
    ):
        batch = small * replicas
        outcomes = [
            cells(
                f"tutorial, {recipe.search}, test",
                *(recipe, batch, rate, batch, seed),
                **common,
                examples=of(tuning=False),
                replicas=replicas,
            )
            for seed in range(sizes.seeds)
        ]
        rows.append([what, batch, outcomes[0].updates, percent(outcomes)])
    title = (
        f"{small} examples per replica, {sizes.tutorial_epochs} epochs of "
        f"{sizes.tutorial_examples:,} examples"
    )
    return Table(title, ["", "batch", "updates", "accuracy, %"], rows)


def mean_accuracy(outcomes: Sequence[Outcome]) -> float:
    """Returns the mean accuracy in percent."""
    return 100 * float(np.mean([outcome.accuracy for outcome in outcomes]))


def percent(outcomes: Sequence[Outcome]) -> str:
    """Formats the mean accuracy and the largest deviation of a seed from it."""
    mean = mean_accuracy(outcomes)
    distance = max(abs(100 * outcome.accuracy - mean) for outcome in outcomes)
    return f"{mean:.2f} ± {distance:.2f}"


def cost(outcomes: Sequence[Outcome], batch: int) -> str:
    """Formats updates and thousands of examples to the target; a dash if a seed misses it."""
    reached = [outcome.reached_at for outcome in outcomes]
    if None in reached:
        return "–"
    updates = float(np.mean([number for number in reached if number is not None]))
    return f"{updates:,.0f} / {updates * batch / 1000:,.0f}k"


def bars(found: Outcomes, batches: Sequence[int], chosen: str) -> list[Bar]:
    """Returns the targets: the chosen recipe's gap to batch 64, and the unscaled recipe's."""
    means = {cell: mean_accuracy(outcomes) for cell, outcomes in found.items()}
    reference = means["unscaled", BASE_BATCH]
    targets = []
    for batch, limit in ((256, 0.5), (1024, 0.5), (2048, 1.5)):
        if batch in batches:
            what = f"points below batch 64 at {batch:,}, {chosen}"
            targets.append(Bar(what, round(reference - means[chosen, batch], 2), limit, "at most"))
    gap = round(reference - means["unscaled", batches[-1]], 2)
    what = f"points below batch 64 at {batches[-1]:,}, unscaled (a gap is expected)"
    return [*targets, Bar(what, gap, 5.0, "at least")]


def plots(found: Outcomes, batches: Sequence[int]) -> list[Plot]:
    """Plots errors and updates over the batch size; leaves out targets not reached."""

    def series(of: Callable[[Outcome], float | None]) -> list[Series]:
        lines = []
        for name in RECIPES:
            points = {}
            for batch in batches:
                if (name, batch) not in found:
                    continue
                outcomes = found[name, batch]
                values = [value for o in outcomes if (value := of(o)) is not None]
                if len(values) == len(outcomes):
                    points[batch] = Spread(float(np.mean(values)), min(values), max(values))
            if points:
                lines.append(Series(name, list(points), list(points.values())))
        return lines

    both = [
        Plot(
            "Test error after equal epochs",
            *("global batch size", "error, %"),
            series(lambda outcome: 100 * (1 - outcome.accuracy)),
            log_x=True,
            log_y=True,
        ),
        Plot(
            f"Updates to {TARGET:.0%}",
            *("global batch size", "updates"),
            series(lambda outcome: outcome.reached_at),
            log_x=True,
            log_y=True,
        ),
    ]
    return [plot for plot in both if plot.series]


def measure(quick: bool) -> Report:
    """Measures all tables."""
    sizes = QUICK if quick else Sizes()
    distribution.configure_devices(num_virtual_devices=REPLICAS)
    cells = Cells(CELLS.with_name("large_batch_quick.json") if quick else CELLS)
    rates = find_rates(cells, sizes)
    chosen = choose(cells, sizes, rates)
    found = compare(cells, sizes, rates)
    columns = ["recipe", *(f"{batch:,}" for batch in sizes.batches)]

    def table(title: str, cell: Callable[[Sequence[Outcome], int], str]) -> Table:
        rows = [
            [
                name,
                *(
                    cell(found[name, batch], batch) if (name, batch) in found else ""
                    for batch in sizes.batches
                ),
            ]
            for name in RECIPES
        ]
        return Table(title, columns, rows)

    tables = [
        table("Test accuracy, %, by global batch size", lambda outcomes, _: percent(outcomes)),
        table(f"Updates / examples to {TARGET:.0%}", cost),
        tutorial(cells, sizes),
    ]
    cells.forget()
    notes = [
        "Learning rates: "
        + "; ".join(f"{name} {rate:g} at batch {batch:,}" for name, (rate, batch) in rates.items())
        + f". Each is the best of {sizes.tries} tries. A training that diverged counts as 0%.",
        f"Best recipe at batch {CHOICE_BATCH:,} on the validation images: {chosen}.",
        *at_the_edge(rates, sizes.tries),
    ]
    return Report(tables, bars(found, sizes.batches, chosen), plots(found, sizes.batches), notes)


if __name__ == "__main__":
    command.main(measure)
