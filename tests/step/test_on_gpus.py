"""An update with few kernels, as on GPUs, computes what it computes on CPUs."""

import numpy as np
import pytest

import ddl
from tests.as_on_gpus import as_on_gpus
from tests.conftest import make_strategy
from tests.training.test_trainer import make_trainer

AVERAGE = ddl.ExponentialMovingAverage(0.9)
CASES = [
    (("one_device", 1), "float64", {"clip_norm": 0.05, "weight_average": AVERAGE}),
    (("one_device", 1), "mixed_float16", {"loss_scale": ddl.LossScale(), "clip_norm": 0.01}),
    # Synchronized normalization, which communicates in each microbatch.
    (
        ("mirrored", 2),
        "float64",
        {
            "accumulation_steps": 2,
            "clip_norm": 0.05,
            "weight_average": AVERAGE,
        },
    ),
]


def values(trainer):
    trainer.train(3)
    averages = trainer.averages.variables if trainer.averages else []
    variables = [*(v.value for v in trainer.model.variables), *averages]
    copies = trainer.strategy.experimental_local_results
    state = trainer.state
    return [
        *(copy.numpy() for v in variables for copy in copies(v)),
        *(state.sums.numpy(), state.gradient_norms.numpy()),
    ]


@pytest.mark.parametrize(("where", "precision", "arguments"), CASES)
def test_updates_are_the_same(where, precision, arguments, monkeypatch):
    strategy = make_strategy(*where)
    expected = values(make_trainer(strategy, precision=precision, l2=0.01, **arguments))
    as_on_gpus(monkeypatch)
    found = values(make_trainer(strategy, precision=precision, l2=0.01, **arguments))
    tolerance = 1e-12 if precision == "float64" else 1e-5
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


def test_an_overflow_skips_the_update(monkeypatch):
    as_on_gpus(monkeypatch)
    scale = ddl.LossScale(initial=2.0**24)
    trainer = make_trainer(
        make_strategy("mirrored", 2), precision="mixed_float16", loss_scale=scale
    )
    trainer.train(1)
    assert int(trainer.state.batches) > int(trainer.state.step) == 1
    assert float(trainer.state.loss_scale) < 2.0**24
