"""What shards would get wrong in silence, beside what a training refuses."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.processes import forked

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def found():
    program = [sys.executable, "-m", "tests.step.shards.small_runs"]
    run = forked.run(program, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.slow
def test_an_evaluation_must_not_gather_the_rows_of_a_shard(found):
    for message in found["gather"]:
        assert "Trainer.batch_shards excludes ddl.gather" in message


@pytest.mark.slow
def test_an_evaluation_must_not_draw_by_shard(found):
    assert "excludes the operation RandomUniform" in found["draw"]


@pytest.mark.slow
def test_all_moving_statistics_of_a_layer_move(found):
    """With renorm=True they are more than mean and variance."""
    whole, of_one, of_two = found["renorm"]
    assert of_one == of_two
    assert len(whole) == 5
    for name, value in whole.items():
        np.testing.assert_allclose(of_one[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
