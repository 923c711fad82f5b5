"""The interface between the verbs and the update, and the records of their calls."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import keras
import tensorflow as tf

from ddl.step.overflow import KeptValues
from ddl.step.reduced import Reduced
from ddl.step.verbs.batches import StepBatch
from ddl.step.verbs.each_example import OfExample
from ddl.step.verbs.gradients import Gradients
from ddl.step.verbs.values import Summed, Values
from ddl.tasks.task import LossFunction


class Call(NamedTuple):
    """A call of a verb.

    Attributes:
      verb: "gradients", "sum", "apply" or "average".
      name: Name of the loss, function or optimizer; "" for an average.
      variables: Variables of the gradient, or those that the verb changes.
      sometimes: Whether the call is within `when`.
      checks: Whether it checks values for overflow.
      moved: Whether the call is within `moved`.
    """

    verb: str
    name: str
    variables: Sequence[Any]
    sometimes: bool
    checks: bool
    moved: bool = False

    @property
    def identity(self) -> tuple[str, str, bool]:
        """The property that each trace of a step must share."""
        return self.verb, self.name, self.sometimes

    @property
    def changes(self) -> bool:
        """Whether it changes variables."""
        return self.verb in ("apply", "average")


class Work(Protocol):
    """The operations that the verbs need; an update and a planning trace implement them."""

    strategy: tf.distribute.Strategy
    seed: int | None

    def name_of_loss(self, loss: LossFunction, name: str | None, source: str) -> str:
        """Returns the name of a loss that is computed of a source's batches."""

    def name_of_optimizer(self, name: str | None) -> str:
        """Returns the name of an optimizer; None means the only one."""

    def model(self, given: Any) -> Any:
        """Returns the model of a verb; None means the task's `model`."""

    def gradients(
        self,
        loss: str,
        variables: Sequence[keras.Variable],
        batch: StepBatch,
        draws: int,
        each: OfExample | None,
    ) -> Reduced:
        """Returns the gradient of a loss over the global batch."""

    def applied_alone(self) -> AbstractContextManager[None]:
        """Says that gradients of the `with` block are applied, and otherwise unused."""

    def sums(self, name: str, values: Values, batch: StepBatch, draws: int) -> Summed:
        """Returns the sum of a function of the examples, and the sum of the weights."""

    def keep_statistics(self) -> KeptValues:
        """Reads the variables that a forward pass changes."""

    def finite(self, values: Sequence[Any]) -> tf.Tensor | None:
        """Returns whether values are finite, bool []; None without loss scaling."""

    def apply(self, optimizer: str, gradients: Gradients) -> tf.Tensor:
        """Applies gradients; returns their norm before clipping, float64 []."""

    def change(
        self, number: int, change: Callable[[], tf.Tensor], finite: tf.Tensor | None
    ) -> tf.Tensor:
        """Makes change `number` of the update, counted from 1, unless a gradient overflowed."""

    def carried(self, books: "Books") -> Any:
        """Returns the books as tensors, with the same structure everywhere in the step."""


class Books:
    """The sums of an update so far.

    Attributes:
      finite: Whether all gradients so far are finite, bool []; None if there are none, or without
        loss scaling.
      sums: Metric sums of each loss, by its name.
      norms: Sum and number of the gradient norms of each optimizer, by its name: float64 [] each;
        the number is a Python integer outside of control flow.
    """

    def __init__(self) -> None:
        self.finite: tf.Tensor | None = None
        self.sums: dict[str, tf.Tensor] = {}
        self.norms: dict[str, tuple[tf.Tensor, tf.Tensor | int]] = {}

    @classmethod
    def of(cls, carried: Mapping[str, Any]) -> "Books":
        """Returns the books that `Work.carried` has returned as tensors."""
        books = cls()
        for name, value in carried.items():  # copies, since the verbs change the dicts in place
            setattr(books, name, dict(value) if isinstance(value, Mapping) else value)
        return books

    def add_check(self, finite: tf.Tensor | None) -> None:
        """Adds a check for overflow, on which the update then depends; None adds none."""
        if finite is not None:
            self.finite = finite if self.finite is None else self.finite & finite

    def add_sums(self, loss: str, sums: tf.Tensor) -> None:
        """Adds metric sums of a loss."""
        self.sums[loss] = self.sums[loss] + sums if loss in self.sums else sums

    def add_norm(self, optimizer: str, norm: tf.Tensor) -> None:
        """Adds the norm of a gradient that an optimizer has applied."""
        total, count = self.norms.get(optimizer, (None, 0))
        self.norms[optimizer] = (norm if total is None else total + norm, count + 1)
