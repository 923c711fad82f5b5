"""N replicas train what one device trains: weights, slots, averages, moments and losses.

The tests run the selected cases, which contain the features of all others, on four replicas. The
benchmark of parity runs every case. tests/training/test_mutations.py shows which faults the
selected cases find.
"""

import numpy as np
import pytest

from tests.conftest import make_strategy
from tests.training.parity_cases import (
    CASES,
    COMBINED,
    SELECTED,
    STEPS,
    differences,
    make_trainer,
    reference,
)

pytestmark = pytest.mark.usefixtures("rows_checked_on_one_device")

RICH, SPARSE, NOISY = COMBINED
ON_TWO, ON_FOUR = ("mirrored", 2), ("mirrored", 4)
IN_FLOAT64 = [
    *((ON_FOUR, name) for name in SELECTED),
    # The only one that differs from the reference on one device: by its microbatches.
    (("one_device", 1), NOISY),
    *((("mirrored", 1), name) for name in (RICH, NOISY)),
    (ON_TWO, RICH),
    *((("central_storage", 2), name) for name in COMBINED),
    (("central_storage", 4), RICH),
]
IN_FLOAT32 = [
    (ON_TWO, "accumulation 4 against the whole batch"),
    (ON_TWO, "augmentation"),
    (ON_TWO, "synchronized BatchNormalization, accumulation 2"),
    *((where, name) for where in (ON_TWO, ("central_storage", 2)) for name in (SPARSE, NOISY)),
]


def assert_small(name: str, largest: dict[str, float], bound: float) -> None:
    assert {"losses", "weights", "slots", "averages"} <= largest.keys()
    assert ("moments" in largest) == ("BatchNormalization" in name)
    assert max(largest.values()) <= bound, largest


@pytest.mark.parametrize(("where", "name"), IN_FLOAT64, ids=str)
def test_in_float64(where, name):
    assert_small(name, differences(name, make_strategy(*where), "float64"), 1e-10)


@pytest.mark.parametrize(("where", "name"), IN_FLOAT32, ids=str)
def test_in_float32(where, name):
    assert_small(name, differences(name, make_strategy(*where), "float32"), 1e-5)


def test_the_clip_bites_at_every_step():
    trainer = make_trainer(CASES[RICH], make_strategy("one_device", 1), "float64")
    assert min(trainer.train(1)["gradient_norm"] for _ in range(STEPS)) > 0.05


@pytest.mark.parametrize("name", [name for name in SELECTED if name != "plain"])
def test_a_case_is_not_the_plain_one(name):
    """Otherwise the case would pass without its features."""
    plain, other = reference("plain", "float64"), reference(name, "float64")
    assert np.max(np.abs(plain["losses"][0] - other["losses"][0])) > 1e-4
