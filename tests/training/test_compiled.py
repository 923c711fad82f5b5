"""Updates that XLA compiles end where the others do, but for rounding."""

import functools

import keras
import numpy as np
import pytest

import ddl
from tests.conftest import make_strategy
from tests.training.parity_cases import WEIGHED, Case, make_trainer, mlp
from tests.training.test_trainer import all_copies

RANDOM = np.random.default_rng(0)


def digits(images=80):
    pixels, labels = ddl.data.digits("train")
    return {"image": pixels[:images].reshape(-1, 8, 8, 1), "label": labels[:images]}


def digits_cnn():
    model = ddl.models.cnn(
        (8, 8, 1), 10, blocks=((4,),), hidden_units=(8,), batch_normalization=True
    )
    return ddl.Classification(model)


def digits_mlp():
    return ddl.Classification(ddl.models.mlp((8, 8, 1), 10, hidden_units=(16,), dropout=0.2))


def sgd():
    return keras.optimizers.SGD(0.1, momentum=0.9)


CASES = {
    "digits CNN, evaluated": (Case(digits_cnn, sgd, digits(), {"eval_data": digits(50)}), 1),
    "two replicas, accumulation, padding, weights": (
        Case(
            functools.partial(mlp, dropout=0.3),
            lambda: keras.optimizers.SGD(0.05, momentum=0.9, weight_decay=0.01),
            WEIGHED,
            {"accumulation_steps": 2, "clip_norm": 0.05},
        ),
        2,
    ),
}


def strategy_on(replicas):
    return make_strategy("mirrored" if replicas > 1 else "one_device", replicas)


def results(case, replicas, jit_compile):
    """Loss and metrics of training, and of an evaluation if there is one; copies; weights."""
    trainer = make_trainer(case, strategy_on(replicas), "float64", jit_compile=jit_compile)
    assert trainer._update.gradient.compiler.is_on == (jit_compile == "on")
    figures = [*trainer.train(7).values()]
    if trainer.has_eval_data:
        figures += trainer.evaluate().values()
    assert trainer.trace_count == 1
    weights = [v.numpy() for v in trainer.model.variables]
    return [np.array(figures), *(c for copies in all_copies(trainer) for c in copies)], weights


@pytest.mark.parametrize("name", CASES)
def test_parity_with_updates_that_are_not_compiled(name):
    case, replicas = CASES[name]
    ours, weights = results(case, replicas, "on")
    theirs, _ = results(case, replicas, "off")
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-10)
    assert all(np.isfinite(value).all() for value in weights)
