"""The likely cause of a difference, found by rules, with its remedy."""

import dataclasses
from collections.abc import Callable, Mapping

from ddl.checking.comparison import Found
from ddl.checking.configurations import Configuration
from ddl.checking.recording import Layer, Recording


@dataclasses.dataclass(frozen=True)
class Cause:
    """A kind of mistake.

    Attributes:
      name: Short name.
      text: The cause.
      remedy: The remedy.
    """

    name: str
    text: str
    remedy: str


CAUSES = {
    cause.name: cause
    for cause in (
        Cause(
            "data",
            "The rows of the batch differ. The data depend on the number of replicas, or the data "
            "source draws random numbers.",
            "Give ddl.Trainer the same data and the same global_batch_size everywhere. Augment in "
            "Keras's layers, not in a tf.data map without seeds.",
        ),
        Cause(
            "moments not synchronized",
            "BatchNormalization takes the moments of one replica's rows.",
            "Build it with synchronized=True.",
        ),
        Cause(
            "draw by replica",
            "Random numbers are drawn on each replica and microbatch, not by the position of the "
            "example in the global batch.",
            "Draw with keras.random or ddl.random, or with layers of Keras.",
        ),
        Cause(
            "second all-reduce",
            "A loss sums over the replicas itself. ddl sums once, after the loss.",
            "Remove the all-reduce, and return one value for each example.",
        ),
        Cause(
            "division by the number of replicas",
            "A value is divided by or multiplied by the number of replicas. ddl divides once, by "
            "the sum of the weights over the global batch.",
            "Remove num_replicas_in_sync from losses, step and optimizer.",
        ),
        Cause(
            "depends on the replica",
            "A value depends on the number of the replica that computes it.",
            "Remove replica_id_in_sync_group. Let a value depend on the features of its example; "
            "an index can be a feature.",
        ),
        Cause(
            "mean over the replica",
            "A mean or a division covers the rows of one replica and microbatch, of which there "
            "are fewer on more replicas.",
            "Return one value for each example, without reduce_mean and without a division by the "
            "number of rows.",
        ),
        Cause(
            "across examples",
            "The value of an example depends on the other rows of its replica and microbatch.",
            "Compute each row from that row alone. Use BatchNormalization(synchronized=True) for "
            "moments of the batch.",
        ),
        Cause(
            "clip before the reduce",
            "A gradient is changed on each replica before the sum over the replicas, as by a clip "
            "in a custom gradient.",
            "Clip with Trainer.clip_norm, or with Gradients.map between update.gradients and "
            "update.apply.",
        ),
        Cause(
            "padding counted",
            "Only batches with padding differ: rows of padding count.",
            "Return the values of examples in a ddl.PerExample, which weighs padding 0. Replace "
            "add_loss and activity regularizers by a loss of the task.",
        ),
        Cause(
            "layer losses",
            "add_loss or an activity regularizer takes a mean over the rows of a replica.",
            "Return these losses from the task in a ddl.PerExample.",
        ),
        Cause(
            "state of a replica",
            "A variable is written on each replica and in each microbatch.",
            "Assign to it in the step, which runs once for all replicas, or compute it from "
            "metrics.",
        ),
        Cause(
            "optimizer",
            "The optimizer gets the same gradients and makes different weights.",
            "Let the optimizer depend on gradients, weights and slots alone.",
        ),
        Cause(
            "step",
            "The step makes another value from the same gradients.",
            "Compute in the step with Gradients, `update.step` and variables alone.",
        ),
        Cause(
            "not in the checkpoint",
            "A resumed run continues from other values: a state lies in Python, in NumPy or in "
            "TensorFlow's random generator, and no checkpoint holds it.",
            "Keep the state in a tf.Variable of the task, and draw with ddl.random.",
        ),
        Cause(
            "names by chance",
            "The layers have other names in each run.",
            "Give each layer a fixed name, or leave names to Keras, which counts. Checkpoints and "
            "parameter groups find variables by these names.",
        ),
        Cause(
            "other computation",
            "The runs do not compute the same values: one calls a layer or a loss that the other "
            "does not call.",
            "Remove conditions on the replicas, on the microbatch and on its number of rows.",
        ),
        Cause("unknown", "No rule names the cause.", "Look at the value that is named above."),
    )
}


@dataclasses.dataclass(frozen=True)
class Case:
    """The input of the rules.

    Attributes:
      found: The difference.
      configuration: Where it was found.
      recording: The run in which it was found.
      only_padded: Whether only the update with padding differs.
      is_renamed: Whether both runs have as many layers, but under other names.
    """

    found: Found
    configuration: Configuration
    recording: Recording
    only_padded: bool
    is_renamed: bool = False

    @property
    def layer(self) -> Layer:
        """The layer whose output differs; one without properties for other stages."""
        nothing = Layer("")
        if self.found.key.stage != "layer":
            return nothing
        return self.recording.layers.get(self.found.key.name, nothing)

    def has(self, *kinds: str) -> bool:
        """Returns whether the user's code does something of these kinds."""
        return any(fact.kind in kinds for fact in self.recording.facts)

    def is_ratio(self, factor: float) -> bool:
        """Returns whether the value is multiplied by a factor other than 1."""
        ratio = self.found.ratio
        return ratio is not None and factor != 1 and abs(ratio - factor) < 1e-6 * factor


_Rule = tuple[str, Callable[[Case], bool], tuple[str, ...]]

_LOSS = ("loss", "weight", "metric")
_FORWARD = ("layer", *_LOSS)
_OF_UPDATE = ("weights", "slots", "statistics", "averages", "own variables")

# Name of the cause, condition, stages; the first rule that holds gives the cause.
_RULES: tuple[_Rule, ...] = (
    ("names by chance", lambda c: c.found.is_missing and c.is_renamed, ()),
    ("data", lambda c: True, ("rows",)),
    ("not in the checkpoint", lambda c: c.configuration.resumed, ()),
    (
        "moments not synchronized",
        lambda c: c.layer.normalizes and not c.layer.synchronized,
        ("layer",),
    ),
    ("depends on the replica", lambda c: c.has("replica_id"), (*_FORWARD, "applied gradients")),
    ("draw by replica", lambda c: c.has("draw", "keras_draw", "numpy_draw"), _FORWARD),
    ("second all-reduce", lambda c: c.has("all_reduce"), (*_FORWARD, "gradients")),
    (
        "division by the number of replicas",
        lambda c: c.has("num_replicas"),
        (*_FORWARD, "gradients", "applied gradients", "updated weights", *_OF_UPDATE),
    ),
    ("other computation", lambda c: c.found.is_missing, ()),
    ("state of a replica", lambda c: c.has("assign") and not c.layer.normalizes, _FORWARD),
    ("mean over the replica", lambda c: c.is_ratio(c.configuration.parts), _FORWARD),
    ("padding counted", lambda c: c.only_padded, (*_FORWARD, "sums", "gradients")),
    ("across examples", lambda c: True, _FORWARD),
    ("clip before the reduce", lambda c: c.has("clip"), ("gradients",)),
    ("layer losses", lambda c: c.has("own_loss"), ("gradients", "sums")),
    (
        "second all-reduce",
        lambda c: c.is_ratio(c.configuration.replicas),
        ("gradients", "sums"),
    ),
    (
        "division by the number of replicas",
        lambda c: c.is_ratio(1 / c.configuration.replicas),
        ("gradients", "sums", "applied gradients"),
    ),
    ("clip before the reduce", lambda c: True, ("gradients",)),
    ("step", lambda c: True, ("applied gradients",)),
    ("optimizer", lambda c: True, ("updated weights",)),
    ("state of a replica", lambda c: True, _OF_UPDATE),
    ("unknown", lambda c: True, ()),
)

# The facts that support a cause, by their kinds.
_EVIDENCE: Mapping[str, tuple[str, ...]] = {
    "data": ("num_replicas",),
    "draw by replica": ("draw", "keras_draw", "numpy_draw"),
    "second all-reduce": ("all_reduce",),
    "division by the number of replicas": ("num_replicas",),
    "depends on the replica": ("replica_id",),
    "clip before the reduce": ("clip",),
    "layer losses": ("own_loss",),
    "padding counted": ("own_loss",),
    "state of a replica": ("assign",),
    "not in the checkpoint": ("draw", "numpy_draw"),
}


def cause_of(case: Case) -> tuple[Cause, list[str]]:
    """Returns the likely cause, and the lines of the user's code that support it."""
    name = next(
        name
        for name, holds, stages in _RULES
        if (not stages or case.found.key.stage in stages) and holds(case)
    )
    kinds = _EVIDENCE.get(name, ())
    places = [place for kind in kinds for place in case.recording.facts_of(kind)]
    return CAUSES[name], list(dict.fromkeys(places))
