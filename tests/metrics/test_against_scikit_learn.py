"""Figures on any devices are those of scikit-learn on all examples, to 1e-12."""

import functools
import json

import numpy as np
import pytest
import tensorflow as tf

from ddl.metrics.state import KerasState
from tests.conftest import make_strategy
from tests.distribution.whole_clusters import addresses, finish_all, start_worker
from tests.metrics import cases

REPLICAS = (1, 2, 4)


@pytest.fixture(scope="module", params=REPLICAS, ids=lambda replicas: f"{replicas} replicas")
def trainer(request):
    kind = "mirrored" if request.param > 1 else "one_device"
    # With padding and microbatches.
    strategy = make_strategy(kind, request.param)
    return cases.trainer_on(strategy, accumulation_steps=2, corpus_metrics=cases.corpus())


@functools.cache
def expected_of(seed):
    return cases.expected_of(cases.data_of(seed))


def check(found, seed, corpus=True):
    expected = dict(expected_of(seed))
    if corpus:
        expected |= {"exact_auc": expected["auc"], "first": cases.data_of(seed)["score"][0]}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-12, abs=1e-12), name


def test_evaluations(trainer):
    """60 sets of predictions, weights and paddings, of one trace."""
    for seed in range(cases.SETS):
        check(trainer.evaluate(cases.Batched(cases.data_of(seed))), seed)


def test_an_epoch_of_training(trainer):
    """Over microbatches and updates, the last one padded; twice, from 0 again."""
    assert len(cases.data_of(0)["label"]) % cases.BATCH
    for _ in range(2):
        check(trainer.train(epochs=1), 0, corpus=False)
    assert trainer.metric_names[0] == "loss"
    assert set(trainer.history.figures("train")) - {"step", "epoch"} == set(trainer.metric_names)


def test_a_state_that_is_summed_once_a_replica_is_seen(monkeypatch):
    """The mutation: each replica adds the state of the whole batch."""
    sums = KerasState.sums

    def of_all(*arguments):
        own, context = sums(*arguments), tf.distribute.get_replica_context()
        return own if tf.executing_eagerly() else context.all_reduce("SUM", own)

    monkeypatch.setattr(KerasState, "sums", of_all)
    trainer = cases.trainer_on(make_strategy("mirrored", 2))
    with pytest.raises(AssertionError, match="TruePositives"):
        check(trainer.evaluate(cases.Batched(cases.data_of(3))), 3, corpus=False)


@pytest.mark.slow
def test_two_workers():
    """Each worker gets all figures; only the chief calls the function of all outputs."""
    hosts = addresses(2)
    program = ("-m", "tests.metrics.cases")
    ended = finish_all([start_worker(i, hosts, program=program) for i in range(2)])
    assert [status for status, _ in ended] == [0, 0], ended
    # TensorFlow may report the end of the other worker on the same line.
    read = json.JSONDecoder().raw_decode
    printed = [
        [read(line)[0] for line in output.splitlines() if line.startswith("[")]
        for _, output in ended
    ]
    (*found, calls), (*others, of_other) = printed
    assert found == others
    trained, *evaluated = [figures for (figures,) in found]
    check(trained, 0, corpus=False)
    for seed in range(cases.SETS):
        check(evaluated[seed], seed)
    weights = [cases.data_of(seed)["weight"] for seed in range(cases.SETS)]
    assert calls == [np.count_nonzero(weight) for weight in weights]
    assert of_other == []
