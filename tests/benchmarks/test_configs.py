"""Tests of the benchmark that repeats the figures in the headers of the configs."""

import re
from pathlib import Path

import pytest

from benchmarks.configs import STATED

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
