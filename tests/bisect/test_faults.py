"""A fault in the code of the second run: the search names its step and its stage."""

import math
import random
from pathlib import Path

import pytest
import tensorflow as tf

from ddl.bisect.search import Side, search
from ddl.data.order import batch_indices
from ddl.replay.folder import read_run
from tests.bisect import faulty
from tests.replay.in_process import Direct, train_run

GIN = Path(__file__).with_name("faulty.gin")
QUICK = ("example swapped", "mask off by one row", "gradient of one replica scaled", "slot changed")


def steps():
    """A step for each fault, drawn at random from all steps of the run."""
    rng = random.Random(27)
    return {fault: rng.randint(1, faulty.STEPS) for fault in faulty.FAULTS}


CASES = [
    pytest.param(fault, step, marks=[] if fault in QUICK else [pytest.mark.slow], id=fault)
    for fault, step in steps().items()
]


def bindings(fault, step):
    """The config of a run with a fault that begins, and ends, at a step."""
    indices, _ = batch_indices(
        tf.constant(step - 1, tf.int64),
        num_examples=faulty.ROWS,
        global_batch_size=faulty.BATCH,
        seed=5,
    )
    examples = [int(indices[random.Random(step).randrange(faulty.BATCH)])]
    return (
        f"Faulty.fault = '{fault}'",
        f"Momentum.fault = '{fault}'",
        f"Points.fault = '{fault}'",
        f"Faulty.at = {step}",
        f"Momentum.at = {step}",
        f"Points.examples = {examples}",
        "CLIP_NORM = 0.5",  # below the norm of each step
    )


class First:
    """The run without a fault, whose players serve all searches."""

    def __init__(self, folder: Path):
        self.path = folder / "a"
        train_run(GIN, self.path, *bindings("", 1))
        self.run = read_run(self.path)
        self.exact = Direct(self.path, folder / "exact")
        self.exact.replayer.begin(0)
        self.detailed = Direct(self.path, folder / "detailed", in_detail=True)

    def side(self):
        return Side(self.run, self.exact, lambda: self.detailed)


@pytest.fixture(scope="module", autouse=True)
def _planted():
    with pytest.MonkeyPatch.context() as patch:
        faulty.plant(patch)
        yield


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    return First(tmp_path_factory.mktemp("first"))


def second(folder, *params):
    train_run(GIN, folder / "b", *params)
    exact = Direct(folder / "b", folder / "exact")
    made = Side(
        read_run(folder / "b"),
        exact,
        lambda: Direct(folder / "b", folder / "detailed", in_detail=True),
    )
    return made, exact


@pytest.mark.parametrize(("fault", "step"), CASES)
def test_a_fault_is_found(first, fault, step, tmp_path):
    side, exact = second(tmp_path, *bindings(fault, step))
    lines = []
    result = search(first.side(), side, report=lines.append)
    found = result.difference
    assert (found.step, found.stage) == (step, faulty.FAULTS[fault]), (found, lines)
    assert (result.equal, result.differs) == (step - 1, step)
    assert 1 <= result.replays <= math.log2(faulty.STEPS)
    assert exact.done.count("train") <= result.replays  # the recorded one, and the verification
    assert all("it ends at the bits of its checkpoint" in one for one in result.verdicts)
    if "one replica" in fault:
        assert found.replicas == (1,)
    if faulty.FAULTS[fault] == "data":
        assert len(found.rows) == 1
        ((example, other),) = found.examples
        assert f"Points.examples = [{example}]" in bindings(fault, step)
        assert example == other


def test_there_are_twenty_faults():
    assert len(faulty.FAULTS) >= 20
    assert len(set(steps().values())) > 10
