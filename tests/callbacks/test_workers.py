"""Callbacks of several workers: on the chief alone, or on all."""

import numpy as np
import pytest
import tensorflow as tf
from ddl.callbacks.calling import Calls, names_of
from ddl.callbacks.fingerprint import _bytes_of, _checksum

from ddl.callbacks import Every
from ddl.distribution.workers import Workers, alone
from ddl.errors import ConfigError


def test_texts_and_complex_numbers_have_checksums():
    for values in (["a", "b"], "a", [1 + 2j, 3]):
        variable = tf.Variable(values)
        before = _bytes_of(variable)
        assert before == _bytes_of(tf.Variable(values))
        other = tf.reverse(variable, [0]) if variable.shape.rank else tf.constant("c")
        assert _bytes_of(tf.Variable(other)) != before
    assert int(_checksum(tf.Variable([1 + 2j]))) != int(_checksum(tf.Variable([2 + 1j])))


def calls_of_chief(trainer, function):
    calls = Calls([Every(1, function, on="chief")], trainer, None, lambda *_: None, dict)
    calls._workers.number = 2
    return calls.actions[0]


def one_more(variable, place):
    """Changes one entry."""
    values = np.array(variable)
    values[place] += 1
    variable.assign(values)


def test_the_chief_alone_may_not_change_the_training(trainer):
    calls_of_chief(trainer, lambda moment: np.zeros(3) and None)  # changes nothing
    for change in (
        lambda moment: moment.trainer.task.weight.assign_add(1.0) and None,
        lambda moment: setattr(moment.trainer.optimizer, "learning_rate", 0.01),
        lambda moment: one_more(moment.trainer.model.variables[0], (2, 1)),
        lambda moment: one_more(moment.trainer.optimizer.iterations, ()),
    ):
        with pytest.raises(ConfigError, match=r"runs on the chief alone, .* Pass on='all'"):
            calls_of_chief(trainer, change)(1)


def test_no_collective_runs_alone(trainer):
    workers = Workers(trainer.strategy)
    with alone(trainer.strategy, "the callback show"):
        assert not workers.any(False)  # one process needs no other
        workers.number = 2
        with pytest.raises(ConfigError, match="needs all 2 workers, but the callback show runs on"):
            workers.any(False)
    workers.check_together("evaluate")


def calls_of_workers(trainer, callbacks, monkeypatch):
    """Returns the calls of a worker whose peer had the row of its first gathering."""
    calls, rows = Calls(callbacks, trainer, None, lambda *_: None, dict), []

    def gather(row):
        rows.append(row)
        return np.stack([row, rows[0]])

    calls._workers.number = 2
    monkeypatch.setattr(calls._workers, "gather", gather)
    monkeypatch.setattr(calls._workers, "barrier", lambda: None)
    return calls


@pytest.mark.parametrize("values", [(0.25, 0.5), (0.25, None), (None, 0.25)])
@pytest.mark.parametrize("changed", ["weight of a loss", "bias of the model"])
def test_all_workers_make_the_same_changes(trainer, monkeypatch, changed, values):
    is_own = changed == "weight of a loss"
    variable = trainer.task.weight if is_own else trainer.model.variables[-1]

    def change(moment):
        if (value := given.pop(0)) is not None:
            variable.assign(np.full(variable.shape, value))

    def call():
        variable.assign(np.ones(variable.shape))
        calls.actions[0](1)

    for same in (0.25, None):
        calls = calls_of_workers(trainer, [Every(1, change)], monkeypatch)
        given = [same, same]
        call()
        call()
    calls = calls_of_workers(trainer, [Every(1, change)], monkeypatch)
    given = list(values)
    call()
    with pytest.raises(ConfigError, match="The callback change changed .* on worker 1 otherwise"):
        call()


def test_the_end_of_another_worker_is_known_by_name(trainer, monkeypatch):
    """Also that of the second of two functions of the same name."""
    callbacks = [Every(1, lambda moment: None), Every(1, lambda moment: moment.end("enough"))]
    assert names_of(callbacks) == ["<lambda>", "<lambda> 2"]
    calls = Calls(callbacks, trainer, None, lambda *_: None, dict)
    calls.actions[1](1)
    assert calls.ending() == "<lambda> 2"
    trainer.withdraw_stop()
    chief = Calls(callbacks, trainer, None, lambda *_: None, dict)
    monkeypatch.setattr(chief._workers, "gather", lambda row: np.stack([row, [1.0]]))
    assert chief.ending() == "<lambda> 2"
    assert chief.reason == "the callback <lambda> 2 of another worker ends it"
    monkeypatch.setattr(chief._workers, "gather", lambda row: np.stack([row, row]))
    assert chief.ending() is None
