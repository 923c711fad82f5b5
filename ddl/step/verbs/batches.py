"""The batches that a step reads in an update: those that it is given, and further ones."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from ddl.data.pipeline import Batch
from ddl.errors import ConfigError
from ddl.step.verbs.turns import Turns


@dataclasses.dataclass(frozen=True)
class StepBatch:
    """A global batch, as a step gets it and passes it to the verbs.

    Attributes:
      source: Name of its source; "" if the Trainer has a single one.
      place: Its place among the batches of the source in the update, a Python integer or int32 [].
      batch: All batches of the source in the update.
    """

    source: str
    place: int | tf.Tensor
    batch: Batch

    def __getitem__(self, feature: Any) -> Any:
        """Raises ConfigError: a step cannot read examples itself."""
        raise ConfigError(
            f"A step cannot read batch[{feature!r}]: each replica has its own rows of the batch. "
            "Read the features in a loss, a method of (features, training) that returns a "
            "ddl.PerExample, and pass it: update.minimize(self.loss, batch). See docs/own-step.md."
        )


class StepBatches:
    """Hands out the batches of an update.

    Attributes:
      taken: Number of batches taken of each source, by its name.
    """

    def __init__(self, batches: Mapping[str, Batch]):
        """Keeps the batches of each source, by its name."""
        self.taken = dict.fromkeys(batches, 1)
        self._batches = batches

    @property
    def given(self) -> StepBatch | dict[str, StepBatch]:
        """The batches that a step is given: one, or one of each source by its name."""
        given = {name: StepBatch(name, 0, batch) for name, batch in self._batches.items()}
        return given[""] if list(given) == [""] else given

    def next(self, batch: StepBatch, turns: Turns) -> StepBatch:
        """Returns a further batch of the same source; in each turn of a repeat another one.

        Raises:
          ConfigError: Where the number of batches of an update would depend on a tensor.
        """
        if turns.count is None:
            raise ConfigError(
                "update.next must read the same number of batches in each update, but was called "
                "within update.when, or within an update.repeat whose number of turns is a tensor. "
                "Call it before update.when, or give update.repeat a Python integer."
            )
        place = self.taken[batch.source] + turns.place
        self.taken[batch.source] += turns.count
        return StepBatch(batch.source, place, self._batches[batch.source])


def check_batch(verb: str, batch: Any) -> None:
    """Raises ConfigError if what a verb is given is no batch."""
    if isinstance(batch, StepBatch):
        return
    if isinstance(batch, Mapping) and all(isinstance(one, StepBatch) for one in batch.values()):
        raise ConfigError(
            f"update.{verb} takes one batch, got those of the sources {', '.join(batch)}. Pass one "
            f'of them, such as batch["{next(iter(batch))}"].'
        )
    raise ConfigError(
        f"update.{verb} takes the batch that the step was given, got {batch!r:.80}. "
        "Pass `batch` unchanged; the loss gets its features."
    )
