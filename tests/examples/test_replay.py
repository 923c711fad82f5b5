"""The example with a replay buffer learns its game."""

import json

import numpy as np

from tests.examples.test_examples import ONE, run
from tests.run.whole_runs import ROOT


def test_it_learns_to_win(tmp_path, monkeypatch):
    run("examples/replay.gin", (), tmp_path, ONE)
    found = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    won = {line["step"]: line["won"] for line in found if "won" in line}
    assert won.keys() == {250, 500, 750, 1000}
    assert won[1000] > 0.95
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import replay

    random = np.random.default_rng(1)
    _, by_chance = replay.play(1000, lambda states: random.integers(3, size=len(states)), random)
    assert 0.15 < by_chance < 0.3  # as the header says
