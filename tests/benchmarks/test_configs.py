"""Tests of the benchmark that repeats the figures in the headers of the configs."""

import re
from pathlib import Path

import pytest

from benchmarks.configs import STATED, Stated, distance, shown

CONFIGS = Path(__file__).parents[2] / "configs"


def header(name):
    lines = (CONFIGS / name).read_text().splitlines()
    ends = next(i for i, line in enumerate(lines) if not line.startswith("#"))
    return " ".join(line[2:] for line in lines[:ends])


@pytest.mark.parametrize("stated", STATED, ids=lambda s: f"{s.config}-{s.metric}-{s.texts[0]}")
def test_the_header_states_the_figure(stated):
    text = header(stated.config)
    for figure in (*stated.texts, *stated.params):
        assert figure in text


def test_each_config_that_states_an_accuracy_is_repeated():
    stating = {
        path.name
        for path in CONFIGS.glob("*.gin")
        if re.search(r"test digits|test images|test penguins|rest of the play", header(path.name))
    }
    assert stating == {stated.config for stated in STATED}


def test_a_figure_is_compared_with_the_nearest_one_stated():
    accuracy = Stated("a.gin", "accuracy", ["98.0%", "99.0%"])
    assert distance(accuracy, 0.987) == pytest.approx(0.5)
    assert shown(accuracy, 0.987) == "98.7%"
    loss = Stated("a.gin", "loss", ["1.75"])
    assert distance(loss, 1.79) == pytest.approx(2)
    assert shown(loss, 1.79) == "1.790"
    every = Stated("a.gin", "accuracy", ["all 67"])
    assert distance(every, 1.0) == 0
    assert distance(every, 66 / 67) == pytest.approx(0.746, abs=1e-3)
