"""The batches that a step reads in an update: the given ones and further ones."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ddl.data.batch import Batch
from ddl.errors import ConfigError, did_you_mean
from ddl.step.verbs.misuse import Guarded, NoSuchName


@dataclasses.dataclass(frozen=True)
class StepBatch(Guarded):
    """A global batch, as a step gets it and passes it to the verbs.

    Attributes:
      source: Name of its source; "" if the Trainer has a single one.
      place: Its place among the batches of the source in the update.
      batch: All batches of the source in the update.
    """

    source: str
    place: int
    batch: Batch

    _called = "batch"

    def __getitem__(self, feature: Any) -> Any:
        """Raises ConfigError: a step cannot read examples itself."""
        raise ConfigError(_cannot_read(f"batch[{feature!r}]"))

    def __len__(self) -> int:
        """Raises ConfigError, as `__getitem__`."""
        raise ConfigError(_cannot_read("len(batch)"))

    def __iter__(self) -> Any:
        """Raises ConfigError, as `__getitem__`."""
        raise ConfigError(_cannot_read("the batch in a loop"))

    def __contains__(self, feature: Any) -> bool:
        """Raises ConfigError, as `__getitem__`."""
        raise ConfigError(_cannot_read(f"{feature!r} in batch"))

    def __bool__(self) -> bool:
        """Returns True; without it, Python would ask for the length."""
        return True

    def _refusal(self, name: str) -> str:
        return _cannot_read(f"batch.{name}")


def _cannot_read(what: str) -> str:
    return (
        f"A step cannot read {what}: each replica has its own rows of the batch. Read the features "
        "in a loss, a method of (features, training) that returns a ddl.PerExample, and pass it: "
        "update.minimize(self.loss, batch). See docs/own-step.md."
    )


class BatchesBySource(dict[str, StepBatch]):
    """The batches for a step with several sources, by the name of the source."""

    def __missing__(self, name: Any) -> StepBatch:
        raise ConfigError(
            f"batch[{name!r}]: Trainer.train_data has no source {name!r}, but {', '.join(self)}."
            f"{did_you_mean(str(name), self)}"
        )

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            first = name if name in self else next(iter(self))
            raise NoSuchName(
                f"batch.{name} does not exist: batch is a dict with a batch of each source, "
                f'{", ".join(self)}. Write batch["{first}"].'
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
        return given[""] if list(given) == [""] else BatchesBySource(given)

    def next(self, batch: StepBatch, is_in_branch: bool) -> StepBatch:
        """Returns a further batch of the same source.

        Raises:
          ConfigError: In a branch, where the number of batches of an update depends on a tensor.
        """
        if is_in_branch:
            raise ConfigError(
                "update.next must read the same number of batches in each update, but was called "
                "within update.when. Call it before update.when."
            )
        place = self.taken[batch.source]
        self.taken[batch.source] += 1
        return StepBatch(batch.source, place, self._batches[batch.source])


def check_batch(verb: str, batch: Any) -> None:
    """Raises ConfigError if the argument of a verb is not a batch."""
    if isinstance(batch, StepBatch):
        return
    if isinstance(batch, Mapping) and all(isinstance(one, StepBatch) for one in batch.values()):
        raise ConfigError(
            f"update.{verb} takes one batch, got those of the sources {', '.join(batch)}. Pass one "
            f'of them, such as batch["{next(iter(batch))}"].'
        )
    order = " The function comes first, then the batch." if callable(batch) else ""
    raise ConfigError(
        f"update.{verb} takes the batch that the step was given, got {batch!r:.80}. "
        f"Pass `batch` unchanged; the loss gets its features.{order}"
    )
