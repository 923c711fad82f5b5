"""The memory of a replica against that of its device, and the settings that take less."""

import functools
import re

import keras
import numpy as np
import pytest

import ddl
from ddl.precision import set_precision
from ddl.run.memory import held_by_replica, memory_of_replica
from ddl.step.observing import observed_by
from ddl.step.remat.activations import Activations
from ddl.training.checks.row_independence import RowIndependence
from tests.conftest import make_strategy

ROWS, WIDTH = 2048, 256
DATA = np.zeros([ROWS, 8], "f4"), np.zeros([ROWS], int)


def network() -> keras.Model:
    """Weights of 0.8 MB, and activations of about 8 MB on each of two replicas."""
    hidden = [keras.layers.Dense(WIDTH, "gelu") for _ in range(4)]
    layers = [*hidden, keras.layers.BatchNormalization(name="norm"), keras.layers.Dense(3)]
    return keras.Sequential([keras.Input([8]), *layers])


@functools.cache
def traced(precision="float32", **arguments):
    """A trainer on two replicas after its trace, and the observer of that trace."""
    set_precision(precision)
    with make_strategy("mirrored", 2).scope():
        trainer = ddl.Trainer(
            ddl.Classification(network()),
            keras.optimizers.Adam(),
            DATA,
            global_batch_size=ROWS,
            weight_average=ddl.ExponentialMovingAverage(),
            **arguments,
        )
    with observed_by(activations := Activations()):
        trainer.trace()
    set_precision("float32")
    return trainer, activations


@pytest.fixture(autouse=True)
def without_check_of_rows(monkeypatch):
    monkeypatch.setattr(RowIndependence, "check", lambda *_: None)


def bytes_in(text: str) -> float:
    number, unit = re.match(r"about ([\d.,]+) (\w+)", text).groups()
    return float(number.replace(",", "")) * {"kB": 1e3, "MB": 1e6, "GB": 1e9}[unit]


def test_settings_that_would_fit_are_predicted():
    texts = memory_of_replica(*traced(), limit=12)
    of_device = texts["memory of its device"]
    assert of_device.startswith(
        "6.29 MB (--memory_limit=12, for each of the 2 replicas of this process): "
    )
    assert of_device.endswith(" MB too little")
    predicted = {
        name.removeprefix("memory with "): text
        for name, text in texts.items()
        if name.startswith("memory with ")
    }
    assert list(predicted) == [
        "--shard_optimizer_state",
        "PRECISION = 'mixed_bfloat16'",
        "Trainer.remat = @Remat()",
        "ACCUMULATION_STEPS = 16",
    ]
    settings = (
        {"shard_optimizer_state": True},
        {"precision": "mixed_bfloat16"},
        {"remat": ddl.Remat()},
        {"accumulation_steps": 16},
    )
    for text, arguments in zip(predicted.values(), settings, strict=True):
        total = held_by_replica(*traced(**arguments)).total
        assert abs(bytes_in(text) / total - 1) < 0.05  # batch normalization keeps some float32
        assert (", fits" in text) == (total <= 6 << 20)
    assert predicted["ACCUMULATION_STEPS = 16"].endswith(" MB, fits; changes the result (norm)")


def test_settings_that_fit_only_together():
    texts = memory_of_replica(*traced(), limit=8)
    *alone, together = [name for name in texts if name.startswith("memory with ")]
    assert all("does not fit" in texts[name] for name in alone)
    assert re.fullmatch(
        r"memory with --shard_optimizer_state, PRECISION = 'mixed_bfloat16', Trainer.remat = "
        r"@Remat\(\), ACCUMULATION_STEPS = \d+",
        together,
    )
    notes = "MB, fits; rounds more, takes time, changes the result (norm)"
    assert texts[together].endswith(notes)


def test_nothing_is_suggested_where_the_updates_fit():
    texts = memory_of_replica(*traced())
    assert texts["memory of its device"].endswith(" replicas of this host): fits")
    assert not any(name.startswith("memory with ") for name in texts)
