"""The findings of a check, as values and as text."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from ddl.checking.causes import Case, Cause, cause_of
from ddl.checking.comparison import Compared, compare
from ddl.checking.configurations import ALL, ONE, RESUMED, WRITER, Configuration
from ddl.checking.recording import Recording
from ddl.errors import DdlError

_WHAT = {
    "rows": "the feature {name!r} of the batch",
    "layer": "the output of the layer {name!r}",
    "loss": "the loss of each example, {name}",
    "weight": "the weight of each example, {name}",
    "metric": "the metric {name!r} of each example",
    "sums": "the sums of the loss {name!r} over the global batch",
    "gradients": "the reduced gradient of {name!r}",
    "applied gradients": "the gradient of {name!r} that is applied, before it is clipped",
    "updated weights": "the weight {name!r} after the optimizer",
    "weights": "the weight {name!r} after the update",
    "slots": "the optimizer's variable {name!r} after the update",
    "statistics": "the layer's variable {name!r} after the update",
    "averages": "the average {name!r} after the update",
    "own variables": "the task's variable {name!r} after the update",
    "start": "a check of ddl before training",
    "run": "an error",
}


class ComputationDiffers(DdlError, AssertionError):
    """A task computes other values on another number of replicas or microbatches."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first value in which a configuration differs from one device.

    Attributes:
      configuration: The configuration.
      reference: Name of the configuration compared with.
      update: Number of the update, from 1; 0 if the run failed.
      stage: One of `ddl.checking.recording.STAGES`; "start" if ddl refused the task, "run" if the
        run failed.
      name: Name of the layer, loss, metric or variable.
      size: Largest difference, relative to the largest value; infinite if there is no value.
      expected: The entry of the reference where the difference is largest.
      got: The same entry in this configuration.
      row: Position of its example in the batch; None for values without rows.
      loss: Name of the loss that was computed; "" for other stages.
      cause: The likely cause.
      evidence: Lines of the user's code, or names of layers, that support the cause.
      message: The error, if the run failed.
      order: Place in the order of the computation.
    """

    configuration: Configuration
    reference: Configuration
    update: int
    stage: str
    name: str
    size: float
    expected: float
    got: float
    row: int | None
    loss: str
    cause: Cause
    evidence: Sequence[str]
    message: str = ""
    order: tuple[int, ...] = ()

    def __str__(self) -> str:
        """Returns the difference in a few lines: what, where, how much, cause, remedy."""
        what = _WHAT[self.stage].format(name=self.name)
        if self.message:
            lines = [f"{self.configuration}: {what}", self.message]
            if self.stage == "start":
                return "\n".join(lines)
        else:
            row = "" if self.row is None else f" in row {self.row}"
            loss = f", in the loss {self.loss}" if self.loss and self.stage == "layer" else ""
            lines = [f"{self.configuration}, update {self.update}: {what}{loss}"]
            if np.isfinite(self.size):
                lines.append(
                    f"  got {self.got:.9g}{row}, where {self.reference} gives "
                    f"{self.expected:.9g}; relative difference {self.size:.1e}"
                )
            else:
                lines.append(f"  the runs do not both compute it; compared with {self.reference}")
        lines.append(f"  likely cause: {self.cause.name}. {self.cause.text}")
        lines += [f"    see {place}" for place in self.evidence]
        return "\n".join([*lines, f"  remedy: {self.cause.remedy}"])


@dataclasses.dataclass(frozen=True)
class Report:
    """The result of a check.

    Attributes:
      task: Name of the task's class.
      differences: The first difference of each configuration that differs, the earliest in the
        order of the computation first; empty if the task computes the same everywhere.
      checked: The configurations that ran.
      values: Number of values that were compared.
      largest: Largest relative difference that counts as rounding.
      notes: Lines about what was not checked.
    """

    task: str
    differences: Sequence[Difference]
    checked: Sequence[Configuration]
    values: int
    largest: float
    notes: Sequence[str]

    @property
    def same(self) -> bool:
        """Whether the task computes the same in all configurations."""
        return not self.differences

    def raise_if_different(self) -> None:
        """Raises ComputationDiffers, with the text of this report, if there is a difference."""
        if self.differences:
            raise ComputationDiffers(str(self))

    def __str__(self) -> str:
        """Returns the report for a reader."""
        if self.same:
            ran = "; ".join(str(one) for one in self.checked)
            lines = [
                f"{self.task} computes the same everywhere. {self.values:,} values were compared; "
                f"the largest relative difference is {self.largest:.0e}.",
                f"Configurations: {ran}.",
            ]
        else:
            first, *others = self.differences
            lines = [f"{self.task} does not compute the same everywhere. First difference:"]
            lines.append(str(first))
            if others:
                lines.append("Further configurations differ first in:")
                lines += [f"  {_short(other)}" for other in others]
        return "\n".join([*lines, *self.notes])


def report_on(recordings: Mapping[Configuration, Recording]) -> Report:
    """Compares the recordings of a task.

    Args:
      recordings: The recording of each configuration that ran, with `ONE` and those that others are
        compared with.
    """
    one = recordings[ONE]
    notes = list(dict.fromkeys(note for r in recordings.values() for note in r.notes))
    if one.failure is not None:
        return Report(one.task, [_failed(ONE, one)], [ONE], 0, 0.0, notes)
    differences: list[Difference] = []
    checked: list[Configuration] = [ONE]
    values, largest = 0, 0.0
    skipped = []
    for configuration in [one for one in ALL[1:] if one in recordings]:
        recording = recordings[configuration]
        if recording.skipped is not None:
            notes += [recording.skipped] if recording.skipped not in notes else []
            continue
        if one.batch_size is None or one.batch_size % configuration.parts:
            skipped.append(str(configuration))
            continue
        if recording.failure is not None:
            differences.append(_failed(configuration, recording))
            continue
        reference = _reference(configuration, one)
        if reference == configuration or recordings[reference].failure is not None:
            continue
        if configuration.resumed and not recording.values:
            continue  # the run that writes the checkpoint has failed
        compared = compare(recordings[reference], recording, exact=configuration.resumed)
        checked.append(configuration)
        values, largest = values + compared.values, max(largest, compared.largest)
        if compared.found is not None:
            differences.append(
                _difference(compared, configuration, reference, recordings[reference], recording)
            )
    if skipped:
        notes.append(
            f"Not checked, since they do not divide the batch of {one.batch_size}: "
            f"{'; '.join(skipped)}."
        )
    if one.normalizing:
        notes.append(
            f"{', '.join(one.normalizing)}: BatchNormalization takes moments of a microbatch, so "
            "its results depend on ACCUMULATION_STEPS. Only runs with the same number of "
            "microbatches were compared."
        )
    differences.sort(key=lambda one: one.order)
    return Report(one.task, differences, checked, values, largest, notes)


def _reference(configuration: Configuration, one: Recording) -> Configuration:
    if configuration == RESUMED:
        return WRITER
    return ONE._replace(microbatches=configuration.microbatches) if one.normalizing else ONE


def _difference(
    compared: Compared,
    configuration: Configuration,
    reference: Configuration,
    expected: Recording,
    recording: Recording,
) -> Difference:
    found = compared.found
    assert found is not None
    padded = _updates_with_padding(expected)
    only_padded = found.key.update in padded and found.key.update > min(
        {key.update for key in expected.values} - padded, default=found.key.update
    )
    names = [one.layers.keys() for one in (expected, recording)]
    is_renamed = names[0] != names[1] and len(names[0]) == len(names[1])
    case = Case(found, configuration, recording, only_padded, is_renamed)
    cause, evidence = cause_of(case)
    return Difference(
        configuration=configuration,
        reference=reference,
        update=found.key.update + 1,
        stage=found.key.stage,
        name=found.key.name,
        size=found.size,
        expected=found.expected,
        got=found.got,
        row=found.row,
        loss=recording.losses.get(found.key.call, ""),
        cause=cause,
        evidence=evidence,
        order=found.order,
    )


def _updates_with_padding(recording: Recording) -> set[int]:
    return {
        key.update
        for key, parts in recording.values.items()
        if key.stage == "rows" and key.name == "weight" and any((p.value == 0).any() for p in parts)
    }


_REFUSED = Cause("refused", "ddl refuses the task.", "See the message.")
_FAILED = Cause(
    "error",
    "The run failed in this configuration.",
    "Let the task run on several replicas, and in float64: cast to the dtype of a tensor, as in "
    "tf.cast(noise, x.dtype).",
)
# Parts of TensorFlow's errors about a variable that is written in replica context.
_OF_WRITES = ("an aggregation method to update", "cannot be reduced with the given reduce op")
_WRITES = Cause(
    "state of a replica",
    "A loss or a layer writes a variable in replica context.",
    "Assign to it in the step, which runs once for all replicas, or return a metric.",
)


def _failed(configuration: Configuration, recording: Recording) -> Difference:
    assert recording.failure is not None
    message = recording.failure.message
    cause = _REFUSED if recording.failure.is_refusal else _FAILED
    if any(text in message.lower() for text in _OF_WRITES):
        cause = _WRITES
    return Difference(
        configuration=configuration,
        reference=ONE,
        update=0,
        stage="start" if recording.failure.is_refusal else "run",
        name="",
        size=np.inf,
        expected=np.nan,
        got=np.nan,
        row=None,
        loss="",
        cause=cause,
        evidence=[],
        message=message,
        order=(-1,),
    )


def _short(one: Difference) -> str:
    what = _WHAT[one.stage].format(name=one.name)
    return f"{one.configuration}: {what} ({one.cause.name})"
