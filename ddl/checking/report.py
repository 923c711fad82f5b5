"""The findings of a check: the first difference in each place, its likely cause, and the text."""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

from ddl.checking.comparison import Found


class Place(NamedTuple):
    """Where a run computes.

    Attributes:
      name: Its name in the report.
      devices: Number of virtual CPU devices.
    """

    name: str
    devices: int


ONE = Place("1 device", 1)
TWO = Place("2 devices", 2)
RESUMED = Place("2 devices, resumed in a new process", 2)

CAUSES = {
    "error": (
        "The task cannot run here, or computes other values: a condition depends on the devices.",
        "Let it compute the same on several devices, under fixed names. Assign to variables in the "
        "step, not in a loss or a layer.",
    ),
    "random": (
        "Two runs on one device differ as well: draws or data have no seed, or a module has state.",
        "Draw with ddl.random or keras.random, and give each generator and data set a seed.",
    ),
    "not in the checkpoint": (
        "A state lies in Python, NumPy or TensorFlow's global generator, not in the checkpoint.",
        "Keep the state in a tf.Variable of the task. Draw with ddl.random or keras.random.",
    ),
    "rounding": (
        "The difference is of the size of rounding in float32: a part of the task computes in it.",
        "Cast to the dtype of a tensor, as in tf.cast(noise, x.dtype).",
    ),
    "padding": (
        "Only the update with padding differs: rows of padding count, as with add_loss, an "
        "activity regularizer or a mean over rows.",
        "Return the values of examples in a ddl.PerExample, which weighs padding 0.",
    ),
    "number of devices": (
        "The value is multiplied or divided by the number of devices: by an all-reduce, by "
        "num_replicas_in_sync, or by the number of rows, of which each device has fewer.",
        "Return one value for each example: ddl sums over the devices, and divides by the weights.",
    ),
    "across examples": (
        "The value of an example depends on the other rows of its device or on the device, or the "
        "devices read other data or another global_batch_size.",
        "Compute each row from that row alone, or gather rows with ddl.gather. Return metrics in a "
        "ddl.PerExample or as Keras metrics. Remove replica_id_in_sync_group and draws by device.",
    ),
    "gradient or optimizer": (
        "The same loss gives other weights. Each device changes its gradient before the sum, or "
        "the step or the optimizer draws, or depends on the devices.",
        "Clip with Trainer.clip_norm, or after update.gradients. Let step and optimizer depend on "
        "gradients, weights and slots alone.",
    ),
    "state of a device": (
        "A loss or a layer writes the variable on each device.",
        "Assign to it in the task's step, which runs once for all devices, or use a metric.",
    ),
}
"""The likely causes by name, each with its remedy."""


def cause_of(found: Found, place: Place, repeats: bool, padded: int | None) -> str:
    """Returns the likely cause of a difference, one of `CAUSES`, by the first rule that holds.

    Args:
      found: The difference.
      place: Where it was found.
      repeats: Whether a second run on one device gave the same values as the first.
      padded: Number of the only update whose batch has padding; None if it is not the only one.
    """
    ratio = found.got / found.expected if found.expected else math.nan
    is_figure = found.value.kind.endswith("figure")
    of_devices = any(math.isclose(ratio, n) for n in (place.devices, 1 / place.devices))
    rules = {
        "not in the checkpoint": place == RESUMED,
        "random": not repeats,
        "error": math.isnan(found.got) and math.isinf(found.size),
        "rounding": found.size < 1e-6,
        "padding": found.value.update == padded,
        "number of devices": is_figure and of_devices,
        "across examples": is_figure,
        "gradient or optimizer": found.value.kind == "weight",
        "state of a device": True,
    }
    return next(rule for rule, holds in rules.items() if holds)


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first value in which a place differs from one device.

    Attributes:
      place: Where it was found.
      cause: The likely cause, one of `CAUSES`.
      found: The value; None if the run failed.
      message: The error, if the run failed.
    """

    place: Place
    cause: str
    found: Found | None = None
    message: str = ""

    @property
    def title(self) -> str:
        """The place, and the value that differs."""
        if self.found is None:
            return f"{self.place.name}: an error"
        update, kind, name, _ = self.found.value
        return f"{self.place.name}, update {update}: the {kind} {name!r}"

    def __str__(self) -> str:
        """Returns the difference in a few lines: place, value, size, cause and remedy."""
        if self.found is None:
            lines = [self.title, *self.message.splitlines()]
        else:
            reference = TWO.name if self.place == RESUMED else ONE.name
            _, _, size, expected, got = self.found
            values = f"got {got:.9g}, but {expected:.9g} on {reference}"
            lines = [self.title, f"{values}; relative difference {size:.1e}"]
        cause, remedy = CAUSES[self.cause]
        lines += [f"likely cause ({self.cause}): {cause}", f"remedy: {remedy}"]
        return "\n  ".join(lines)


@dataclasses.dataclass(frozen=True)
class Report:
    """The result of a check.

    Attributes:
      task: Name of the task's class.
      differences: The first difference of each place that differs, the earliest in the order of
        the computation first; empty if the task computes the same everywhere.
      places: The places that were compared with one device.
      values: Number of values that were compared.
      largest: Largest relative difference that counted as rounding.
      notes: Lines about what was not checked.
    """

    task: str
    differences: Sequence[Difference]
    places: Sequence[Place]
    values: int
    largest: float
    notes: Sequence[str]

    @property
    def same(self) -> bool:
        """Whether the task computes the same in all places."""
        return not self.differences

    def __str__(self) -> str:
        """Returns the report for a reader."""
        if self.same:
            lines = [
                f"{self.task} computes the same everywhere, in float64. {self.values:,} values "
                f"were compared; the largest relative difference is {self.largest:.0e}.",
                f"Compared with {ONE.name}: {'; '.join(one.name for one in self.places)}.",
            ]
        else:
            first, *others = self.differences
            lines = [
                f"{self.task} does not compute the same everywhere, in float64. First difference:",
                str(first),
                *(f"Also: {other.title} ({other.cause})" for other in others),
            ]
        return "\n".join([*lines, *self.notes])
