"""Figures on two replicas are those of scikit-learn on all examples, to 1e-12."""

import pytest

from tests.conftest import make_strategy
from tests.metrics import cases


@pytest.fixture(scope="module")
def trainer():
    return cases.trainer_on(make_strategy("mirrored", 2))


def check(found, seed, corpus):
    expected = dict(cases.expected_of(cases.data_of(seed)))
    if corpus:
        expected |= {"exact_auc": expected["auc"], "first": cases.data_of(seed)["score"][0]}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-12, abs=1e-12), name


def test_evaluations(trainer):
    """Sets of predictions, weights and paddings, of one trace."""
    for seed in range(cases.SETS):
        check(trainer.evaluate(cases.data_of(seed)), seed, corpus=True)


def test_an_epoch_of_training(trainer):
    """Over microbatches and updates, the last one padded; twice, from 0 again."""
    assert len(cases.data_of(0)["label"]) % cases.BATCH
    for _ in range(2):
        check(trainer.train(epochs=1), 0, corpus=False)
    assert set(trainer.history.figures("train")) - {"step", "epoch"} == set(trainer.metric_names)
