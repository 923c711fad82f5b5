"""Updates written with ddl's verbs, and losses of gathered rows, are those of plain TensorFlow."""

import itertools

import keras
import numpy as np
import pytest

from tests.contract import step_tasks
from tests.contract.builders import build, make_trainer
from tests.contract.step_tasks import BATCH, ROWS, Plain, batches

STEPS = 5
ONE, TWO, FOUR = ("one_device", 1), ("mirrored", 2), ("mirrored", 4)

CASES = [
    (step_tasks.WganGp, ONE, 1),
    (step_tasks.WganGp, TWO, 2),
    (step_tasks.Sam, TWO, 1),
    (step_tasks.Byol, TWO, 1),
    (step_tasks.DpSgd, TWO, 2),
    (step_tasks.PcGrad, TWO, 2),
    (step_tasks.Clip, FOUR, 1),
]


def name_of(part):
    return getattr(part, "__name__", str(part))


def values_of(task, optimizers):
    """The variables of the models, the optimizers and the task, as TensorFlow's."""
    optimizers = optimizers.values() if isinstance(optimizers, dict) else [optimizers]
    parts = [*vars(task).values(), *optimizers]
    variables = [v for part in parts for v in getattr(part, "variables", [part])]
    return [v.value if isinstance(v, keras.Variable) else v for v in variables]


@pytest.mark.parametrize(("of_task", "where", "accumulation"), CASES, ids=name_of)
def test_a_step_of_verbs_is_the_plain_loop(of_task, where, accumulation):
    data, sizes = of_task.data(), of_task.sizes
    gathers = hasattr(of_task, "whole")
    trainer = make_trainer(
        (of_task, of_task.optimizers),
        data,
        where,
        global_batch_size=sizes,
        accumulation_steps=accumulation,
        eval_data=data if gathers else None,
        **of_task.trainer,
    )
    figures = trainer.train(STEPS, progress=False)
    (before, _), (plain, plain_optimizers) = (build(of_task, of_task.optimizers) for _ in range(2))
    loop = Plain(data, sizes, plain_optimizers)
    for loop.step in range(STEPS):
        plain.plain(loop)
    for value, was in zip(values_of(plain, {}), values_of(before, {}), strict=True):
        assert np.abs(value.numpy() - was.numpy()).max() > 1e-3
    wanted = values_of(plain, plain_optimizers)
    for one, value in zip(values_of(trainer.task, trainer.optimizer), wanted, strict=True):
        for copy in trainer.strategy.experimental_local_results(one):
            np.testing.assert_allclose(copy.numpy(), value.numpy(), rtol=0, atol=1e-10)
    for name, mean in loop.figures().items():
        assert figures[name] == pytest.approx(mean, rel=1e-10), name
    if gathers:
        epoch = itertools.islice(batches(data, BATCH), 3)
        total = sum(plain.whole(rows, False).loss.numpy().sum() for rows in epoch)
        assert trainer.evaluate()["loss"] == pytest.approx(total / ROWS, rel=1e-10)
