"""What counts as a task."""

import keras
import pytest

import ddl
from ddl.errors import ConfigError
from ddl.tasks.task import check_task


class Good:
    model = keras.Sequential([])

    def per_example(self, features, training):
        raise NotImplementedError


class WithoutTraining(Good):
    def per_example(self, features):
        raise NotImplementedError


class WithoutModel:
    per_example = Good.per_example


class TwoTowers(WithoutModel):
    def __init__(self):
        self.users, self.items = keras.Sequential([]), keras.Sequential([])


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (TwoTowers(), r"`users` and `items`: give it a `step` that calls .*self.users.trainable_"),
        (keras.Sequential([], name="net"), "got the Keras model 'net' alone. Pass ddl.Classif"),
        (Good, "got the class Good. Create it, with parentheses"),
        (WithoutModel(), "WithoutModel has no `model`. See ddl.Task"),
        ("cnn", "str has no `model`"),
        (
            WithoutTraining(),
            r"WithoutTraining.per_example must be a function of \(features, training\), got "
            r".*test_task.py:\d+: per_example\(features\)",
        ),
    ],
)
def test_refuses_what_is_no_task(task, message):
    with pytest.raises(ConfigError, match=message):
        check_task(task)
    with pytest.raises(ConfigError, match=message):  # the Trainer asks first of all
        ddl.Trainer(task, None, None, global_batch_size=8)


def test_a_task_passes():
    check_task(Good())
