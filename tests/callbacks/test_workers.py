"""Callbacks of several workers: on the chief alone, or on all."""

import numpy as np
import pytest

from ddl.callbacks import Every
from ddl.callbacks.calling import Calls
from ddl.distribution.workers import Workers, alone
from ddl.errors import ConfigError
from tests.callbacks.runs import events, lines, make_trainer
from tests.callbacks.test_from_configs import CONFIG
from tests.distribution.whole_clusters import finish, launch

CALLBACKS = """
RunPlan.callbacks = [@chief/Every(), @all/Every()]
Every.steps = 2
chief/Every.on = 'chief'
chief/Every.function = @evaluates_alone
all/Every.function = @other_ends
"""


@pytest.mark.slow
def test_two_workers(tmp_path):
    """The second one ends the run, which the chief saves; pictures come from the chief alone."""
    (tmp_path / "run.gin").write_text(CONFIG + CALLBACKS)
    flags = [f"--gin_file={tmp_path}/run.gin", f"--model_dir={tmp_path}/run"]
    status, output = finish(launch(2, *flags), timeout=300)
    assert status == 0, output
    refusal = "refused: Trainer.evaluate needs all 2 workers, but the callback evaluates_alone"
    assert output.count(refusal) == 2
    assert "ends early at step 4: a callback of another worker ends it." in output
    assert [line["step"] for line in lines(tmp_path / "run") if "by_chief" in line] == [2, 4]
    seen = [event[0] for event in events(tmp_path / "run", "train") if event[1] == "seen"]
    assert seen == [2, 4]


def calls_of_chief(trainer, function):
    calls = Calls([Every(1, function, on="chief")], trainer, None, lambda *_: None, dict)
    calls._workers.number = 2
    return calls.actions[0]


@pytest.fixture(scope="module")
def trainer():
    return make_trainer()


def test_the_chief_alone_may_not_change_the_training(trainer):
    calls_of_chief(trainer, lambda moment: np.zeros(3) and None)  # changes nothing
    for change in (
        lambda moment: moment.trainer.task.weight.assign_add(1.0) and None,
        lambda moment: setattr(moment.trainer.optimizer, "learning_rate", 0.01),
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
