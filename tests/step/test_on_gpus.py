"""An update with few kernels, as on GPUs, computes what it computes on CPUs."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl import optimizers
from tests.as_on_gpus import as_on_gpus
from tests.conftest import make_strategy
from tests.optimizers.given_gradients import assert_close, drawn, updated
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


@pytest.mark.parametrize(
    ("make", "atol"),
    [
        (lambda: optimizers.LARS(0.3, weight_decay=0.1, trust_coefficient=0.02), 1e-13),
        (lambda: optimizers.LARS(0.3, epsilon=0.5, exclude=()), 1e-13),
        (lambda: optimizers.LAMB(0.1, weight_decay=0.1), 1e-12),
        (lambda: optimizers.LAMB(0.1, epsilon=0.1, exclude=("one/kernel",)), 1e-12),
        (lambda: keras.optimizers.AdamW(0.1, weight_decay=0.1), 1e-13),
        (lambda: keras.optimizers.SGD(0.1, momentum=0.9, weight_decay=0.1), 1e-13),
    ],
)
def test_optimizers_update_all_variables_together(make, atol, monkeypatch):
    weights, gradients = drawn(6)
    weights[0][:] = 0  # a norm of zero
    gradients[1][2][:] = 0
    strategy = make_strategy("mirrored", 2)
    expected, _ = updated(strategy, make, weights, gradients)
    as_on_gpus(monkeypatch)
    found, _ = updated(strategy, make, weights, gradients)
    assert_close(found, expected, atol)


def test_an_excluded_variable_does_not_decay(monkeypatch):
    as_on_gpus(monkeypatch)

    def make():
        return optimizers.exclude_from_weight_decay(keras.optimizers.SGD(0.1, weight_decay=0.5))

    weights, _ = drawn(0)
    none = [[np.zeros_like(w) for w in weights]]
    (found,), _ = updated(make_strategy("one_device", 1), make, weights, none)
    expected = [weights[0] * 0.95, weights[1], weights[2] * 0.95, weights[3]]
    assert_close([found], [expected])


def test_all_variables_take_few_operations(monkeypatch):
    """LAMB with many variables: an operation for each, and some for all together."""
    as_on_gpus(monkeypatch)
    ones = np.ones((2, 3), "float32")
    variables = [keras.Variable(ones, name=f"v{i}", dtype="float32") for i in range(20)]
    optimizer = optimizers.LAMB(0.1, weight_decay=0.1, exclude=())
    optimizer.build(variables)

    @tf.function(autograph=False)
    def update():
        optimizer.apply([tf.constant(ones)] * 20, variables)

    nodes = update.get_concrete_function().graph.get_operations()
    free = {"Const", "Identity", "Reshape", "NoOp", "ReadVariableOp", "EnsureShape", "Cast"}
    resources = {"VarHandleOp", "AssignVariableOp", "DestroyResourceOp", "Placeholder"}
    kernels = [node.type for node in nodes if node.type not in free | resources]
    assert len(kernels) < 3 * 20 + 40, kernels
