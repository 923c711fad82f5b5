"""Base of ddl's learning rate schedules: their config in Keras's serialized form."""

import inspect
from typing import Any, Self

import keras
from keras.optimizers.schedules import LearningRateSchedule


class Schedule(LearningRateSchedule):
    """A schedule that keeps each argument of its constructor on an attribute of the same name."""

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor, without any state, for `from_config`."""
        names = list(inspect.signature(type(self).__init__).parameters)[1:]
        config = {name: getattr(self, name) for name in names}
        return {
            name: keras.optimizers.schedules.serialize(value)
            if isinstance(value, LearningRateSchedule)
            else value
            for name, value in config.items()
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Builds a schedule in its initial state from the result of `get_config`."""
        arguments = {
            name: keras.optimizers.schedules.deserialize(value)
            if isinstance(value, dict)
            else value
            for name, value in config.items()
        }
        return cls(**arguments)
