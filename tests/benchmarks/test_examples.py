"""The commands of the examples, and their comparisons in `benchmarks.examples`."""

import pytest

from benchmarks import examples
from benchmarks.example_runs import ROOT, commands_of


@pytest.mark.parametrize("example", examples.EXAMPLES)
def test_the_last_command_of_a_header_trains(example):
    *earlier, last = commands_of(ROOT / f"examples/{example}.gin")
    assert f"--gin_file=examples/{example}.gin" in last
    assert f"--model_dir=runs/{example}" in last
    assert all(command[:3] == ["python", "-m", "ddl.main"] for command in [*earlier, last])


@pytest.mark.parametrize("example", examples.EXAMPLES)
def test_each_example_is_compared(example):
    assert callable(getattr(examples.Examples, f"_{example}"))
