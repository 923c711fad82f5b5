"""The trainer of the tests of callbacks, traced once."""

import pytest

from tests.callbacks.runs import make_trainer
from tests.training.rewinding import Start


@pytest.fixture(scope="session")
def start():
    return Start(make_trainer())


@pytest.fixture
def trainer(start):
    trainer = start.again()
    trainer.task.weight.assign(1.0)
    trainer.history.drop_after(-1)
    return trainer
