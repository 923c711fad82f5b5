"""What is kept of the large batches' trainings, and what is asked of them; nothing is trained."""

import dataclasses

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


def test_what_was_not_trained_has_no_point(trained, tmp_path):
    cells = trainings.Cells(tmp_path / "cells.json")
    found = large_batch.compare(cells, SMALL, large_batch.find_rates(cells, SMALL))
    assert {name for name, batch in found if batch == 64} == {"unscaled", "linear"}
    (errors,) = large_batch.plots(found, SMALL.batches)
    firsts = {series.name: series.x[0] for series in errors.series}
    assert firsts == {name: 64 if name in ("unscaled", "linear") else 256 for name in RECIPES}


def test_a_rate_at_the_edge_of_its_grid_is_told():
    edge, inner = (SEARCHES["LARS"].rates[place] for place in (0, 2))
    (note,) = large_batch.at_the_edge({"LARS": (edge, 1024)}, 5)
    assert note.startswith("LARS's rate is the smallest of those tried")
    assert large_batch.at_the_edge({"LARS": (inner, 1024)}, 5) == []


def test_trainings_are_kept_by_all_that_tells_them_apart(trained, tmp_path, monkeypatch):
    path = tmp_path / "cells.json"
    recipe, rows = RECIPES["linear"], [0] * 40
    arguments = (recipe, 64, 0.1, 64, 0, 1, ((rows, rows), (rows, rows)))
    trainings.Cells(path)("linear, test", *arguments)
    others = {1: 128, 2: 0.2, 3: 128, 4: 1, 5: 2, 6: ((rows[1:], rows[1:]), (rows, rows))}
    for place, other in others.items():
        changed = (*arguments[:place], other, *arguments[place + 1 :])
        trainings.Cells(path)("linear, test", *changed)
    assert len(trained) == 7
    again = trainings.Cells(path)("linear, test", *arguments)
    assert len(trained) == 7
    assert dataclasses.asdict(again)["updates"] == 1
    monkeypatch.setattr(trainings, "code_of", lambda: "other code")
    trainings.Cells(path)("linear, test", *arguments)
    assert len(trained) == 8
