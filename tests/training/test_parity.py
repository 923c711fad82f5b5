"""N replicas train what one device trains: weights, slots, averages, moments and losses.

Every case runs on four replicas, and in float32 on two. The cases that combine the others run under
every strategy. tests/training/test_mutations.py shows what these runs can find.
"""

import numpy as np
import pytest

from tests.conftest import STRATEGIES, make_strategy
from tests.training.parity_cases import (
    CASES,
    COMBINED,
    STEPS,
    differences,
    make_trainer,
    reference,
)

IN_FLOAT32 = [name for name, case in CASES.items() if case.in_float32]
ALL_CASES_ON = ("mirrored", 4)
IN_FLOAT64 = [
    *((ALL_CASES_ON, name) for name in CASES),
    *((where, name) for where in STRATEGIES if where != ALL_CASES_ON for name in COMBINED),
]


def assert_small(name: str, largest: dict[str, float], bound: float) -> None:
    assert {"losses", "weights", "slots", "averages"} <= largest.keys()
    assert ("moments" in largest) == ("BatchNormalization" in name)
    assert max(largest.values()) <= bound, largest


@pytest.mark.parametrize(("where", "name"), IN_FLOAT64, ids=str)
def test_in_float64(where, name):
    assert_small(name, differences(name, make_strategy(*where), "float64"), 1e-10)


@pytest.mark.parametrize(
    ("where", "name"),
    [
        *((("mirrored", 2), name) for name in IN_FLOAT32),
        *((("mirrored", 4), name) for name in COMBINED if CASES[name].in_float32),
        *((("central_storage", 4), name) for name in COMBINED if CASES[name].in_float32),
    ],
    ids=str,
)
def test_in_float32(where, name):
    assert_small(name, differences(name, make_strategy(*where), "float32"), 1e-5)


def test_the_clip_bites_at_every_step():
    name = "clipping by global norm, biting at every step"
    trainer = make_trainer(CASES[name], make_strategy("one_device", 1), "float64")
    assert min(trainer.train(1)["gradient_norm"] for _ in range(STEPS)) > 0.05


@pytest.mark.parametrize("name", [name for name in CASES if name != "plain"])
def test_a_case_is_not_the_plain_one(name):
    """Else it would pass without what it is about."""
    plain, other = reference("plain", "float64"), reference(name, "float64")
    assert np.max(np.abs(plain["losses"][0] - other["losses"][0])) > 1e-4
