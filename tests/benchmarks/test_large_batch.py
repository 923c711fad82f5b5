"""What is kept of the large batches' trainings, and what is asked of them; nothing is trained."""

import pytest

from benchmarks import large_batch, trainings
from benchmarks.large_batch import RECIPES, SEARCHES, Sizes

SMALL = Sizes(40, 20, 1, 2, (64, 256, 1024), 5)
CHOSEN = "linear, warm-up"


@pytest.fixture
def trained(monkeypatch):
    """The trainings that were asked for; in validation `CHOSEN` is best, in the test LAMB is."""
    asked = []

    def train(recipe, batch, rate, *args, **kwargs):
        asked.append((recipe, batch, rate, *args))
        tuned = len(args[-1][0][0]) == 30
        best = RECIPES[CHOSEN if tuned else "LAMB, warm-up"]
        return trainings.Outcome(0.9 if recipe is best else 0.8 + min(rate, 0.09), None, 1)

    def data(examples, test_examples, tuning):
        rows = [0] * (30 if tuning else examples)
        return (rows, rows), (rows, rows)

    monkeypatch.setattr(trainings, "train", train)
    monkeypatch.setattr(large_batch, "data", data)
    return asked


def test_one_recipe_is_chosen_without_the_test_set(trained, tmp_path):
    cells = trainings.Cells(tmp_path / "cells.json")
    rates = large_batch.find_rates(cells, SMALL)
    searched = len(trained)
    assert searched == 5 * len(SEARCHES)
    assert large_batch.choose(cells, SMALL, rates) == CHOSEN
    assert len(trained) == searched + 4  # LARS and LAMB have theirs from the search
    found = large_batch.compare(cells, SMALL, rates)
    bars = large_batch.bars(found, SMALL.batches, CHOSEN)
    assert [bar.what for bar in bars[:2]] == [
        f"points below batch 64 at {batch}, {CHOSEN}" for batch in ("256", "1,024")
    ]
