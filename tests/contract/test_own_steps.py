"""An update written with ddl's verbs is the one that plain TensorFlow makes on the whole batch."""

import keras
import numpy as np
import pytest

import ddl
from tests.conftest import make_strategy
from tests.contract import step_tasks
from tests.contract.step_tasks import BATCH, Plain, examples

STEPS = 5

CASES = [
    (step_tasks.Gan, "mirrored", 2, 2),
    (step_tasks.Gan, "central_storage", 2, 1),
    (step_tasks.WganGp, "mirrored", 2, 1),
    (step_tasks.Sam, "mirrored", 2, 1),
    (step_tasks.Byol, "mirrored", 4, 1),
    (step_tasks.DpSgd, "mirrored", 2, 2),
    (step_tasks.PcGrad, "central_storage", 2, 1),
    (step_tasks.TwoSources, "mirrored", 2, 2),
    (step_tasks.LazyPenalty, "mirrored", 2, 1),
]


def build(of_task):
    keras.utils.set_random_seed(7)
    return of_task(), of_task.optimizers()


def values_of(task, optimizers):
    """The variables of the models, the optimizers and the task, as TensorFlow's."""
    optimizers = optimizers.values() if isinstance(optimizers, dict) else [optimizers]
    variables = [v.value for layer in [*task.layers, *optimizers] for v in layer.variables]
    return [*variables, *([task.center] if hasattr(task, "center") else [])]


@pytest.mark.parametrize(
    ("of_task", "kind", "replicas", "accumulation"),
    CASES,
    ids=[f"{task.__name__}-{kind}-{n}-{m}" for task, kind, n, m in CASES],
)
def test_a_step_of_verbs_is_the_plain_loop(of_task, kind, replicas, accumulation):
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    data = of_task.data() if hasattr(of_task, "data") else examples()
    sizes = getattr(of_task, "sizes", BATCH)
    strategy = make_strategy(kind, replicas)
    with strategy.scope():
        task, optimizers = build(of_task)
    trainer = ddl.Trainer(
        task,
        optimizers,
        data,
        global_batch_size=sizes,
        strategy=strategy,
        shuffle=False,
        accumulation_steps=accumulation,
        **of_task.trainer,
    )
    figures = trainer.train(STEPS, progress=False)
    plain, plain_optimizers = build(of_task)
    loop = Plain(data, sizes, plain_optimizers)
    before = values_of(build(of_task)[0], {})
    for loop.step in range(STEPS):
        plain.plain(loop)
    for value, was in zip(values_of(plain, {}), before, strict=True):
        assert np.abs(value.numpy() - was.numpy()).max() > 1e-3
    wanted = values_of(plain, plain_optimizers)
    for found, value in zip(values_of(task, optimizers), wanted, strict=True):
        for copy in strategy.experimental_local_results(found):
            np.testing.assert_allclose(copy.numpy(), value.numpy(), rtol=0, atol=1e-10)
    for name, mean in loop.figures().items():
        assert figures[name] == pytest.approx(mean, rel=1e-10), name
