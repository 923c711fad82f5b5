"""The figures in the headers of the configs, which a benchmark repeats."""

import re

import pytest

from benchmarks.configs import STATED, commands_of
from benchmarks.harness import ROOT

CONFIGS = ROOT / "configs"


def header(name):
    lines = (CONFIGS / f"{name}.gin").read_text().splitlines()
    ends = next(i for i, line in enumerate(lines) if not line.startswith("#"))
    return " ".join(line[2:] for line in lines[:ends])


@pytest.mark.parametrize("config", dict.fromkeys(name for name, *_ in STATED))
def test_the_header_states_the_figures_and_the_command(config):
    for name, _, figures in STATED:
        for figure in figures.split(" or ") if name == config else ():
            assert figure in header(config)
    *_, last = commands_of(CONFIGS / f"{config}.gin")
    assert last[:3] == ["python", "-m", "ddl.main"]
    assert f"--gin_file=configs/{config}.gin" in last


def test_each_config_that_states_an_accuracy_is_repeated():
    stating = {
        path.stem
        for path in CONFIGS.glob("*.gin")
        if re.search(r"test digits|test images|test penguins|rest of the play", header(path.stem))
    }
    assert stating == {name for name, *_ in STATED}
