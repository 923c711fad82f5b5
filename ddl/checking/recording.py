"""The values that a run computed, in the order of the computation. Imports no TensorFlow."""

import dataclasses
from typing import NamedTuple

import numpy as np

STAGES = (
    *("rows", "layer", "loss", "weight", "metric", "sums", "gradients", "applied gradients"),
    *("updated weights", "weights", "slots", "statistics", "averages", "own variables"),
)
"""The stages of an update, in the order in which they are computed.

rows: a feature of the batch. layer: the output of a Keras layer. loss, weight, metric: of each
example. sums: the metric sums of the global batch. gradients: the reduced gradients of a loss.
applied gradients: what a step applies, before penalties and clipping. updated weights: the
variables after the optimizer. The others are read when the update has ended; own variables are
those that the task keeps outside of layers.
"""

AFTER = 1_000_000
"""Number of the call for the variables that are read after an update."""

OF_ROWS = frozenset(["rows", "layer", "loss", "weight", "metric"])
"""Stages whose values are parts of a batch."""


class Key(NamedTuple):
    """Identity of a value, the same in all configurations.

    Attributes:
      update: Number of the update, from 0.
      call: Number of the verb in the step, such as of a gradient or of an `apply`.
      turn: Number of the repetition of this call within the update.
      position: Place in the call.
      stage: One of `STAGES`.
      name: Name of the feature, layer, loss, metric or variable.
    """

    update: int
    call: int
    turn: int
    position: int
    stage: str
    name: str


class Part(NamedTuple):
    """The part of a value that one replica computed in one microbatch.

    Attributes:
      replica: Number of the replica.
      first_row: Position of its first row in the global batch; 0 for values without rows.
      value: The value.
    """

    replica: int
    first_row: int
    value: np.ndarray


class Fact(NamedTuple):
    """Something that the user's code does, seen while it was traced.

    Attributes:
      kind: "all_reduce", "replica_id", "num_replicas", "draw", "keras_draw", "numpy_draw",
        "assign", "clip" or "own_loss".
      place: File and line, or the name of a loss.
    """

    kind: str
    place: str


class Failure(NamedTuple):
    """The error that ended a run.

    Attributes:
      message: The error, for the user.
      is_refusal: Whether ddl raised it for the user; else an operation or the user's code failed.
    """

    message: str
    is_refusal: bool


@dataclasses.dataclass
class Layer:
    """A Keras layer in a recording.

    Attributes:
      kind: Name of its class.
      normalizes: Whether it is a BatchNormalization.
      synchronized: Whether it sums its moments over the replicas.
    """

    kind: str
    normalizes: bool = False
    synchronized: bool = False


@dataclasses.dataclass
class Recording:
    """The values that a run computed.

    Attributes:
      values: The parts of each value.
      layers: The layers by the names of `Key.name`.
      losses: Name of the loss of each call that computes a gradient.
      facts: Facts about the user's code.
      normalizing: Names of layers that take moments of the batch.
      batch_size: The global batch size; None if there is no trainer.
      task: Name of the task's class.
      failure: The error that ended the run; None if it reached its end.
      mistake: A mistake in the call of the check itself, such as a module that does not exist.
      skipped: Why the configuration cannot run this task, which is no mistake; None if it can.
      notes: Lines for the report.
    """

    values: dict[Key, list[Part]] = dataclasses.field(default_factory=dict)
    layers: dict[str, Layer] = dataclasses.field(default_factory=dict)
    losses: dict[int, str] = dataclasses.field(default_factory=dict)
    facts: list[Fact] = dataclasses.field(default_factory=list)
    normalizing: list[str] = dataclasses.field(default_factory=list)
    batch_size: int | None = None
    task: str = "The task"
    failure: Failure | None = None
    mistake: str | None = None
    skipped: str | None = None
    notes: list[str] = dataclasses.field(default_factory=list)

    def add(self, key: Key, part: Part) -> None:
        """Adds a part; a part that is there already belongs to the next turn."""
        while any(p[:2] == part[:2] for p in self.values.get(key, ())):
            key = key._replace(turn=key.turn + 1)
        self.values.setdefault(key, []).append(part)

    def note_fact(self, kind: str, place: str) -> None:
        """Adds a fact, unless it is known."""
        fact = Fact(kind, place)
        if fact not in self.facts:
            self.facts.append(fact)

    def facts_of(self, kind: str) -> list[str]:
        """Returns the places of the facts of a kind."""
        return [fact.place for fact in self.facts if fact.kind == kind]
