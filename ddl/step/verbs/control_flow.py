"""The control flow of a step: `when`, which carries the sums of the verbs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from ddl.errors import ConfigError, check_takes
from ddl.step.verbs.call_context import CallContext
from ddl.step.verbs.draws import StepDraws
from ddl.step.verbs.misuse import Guarded
from ddl.step.verbs.work import Books, Work


class ControlFlow(Guarded):
    """The part of an update that runs verbs in branches.

    Attributes:
      books: Sums of the update so far.
    """

    def __init__(self, work: Work, draws: StepDraws):
        """Keeps the arguments.

        Args:
          work: Computes gradients and applies them.
          draws: Source of the step's own random numbers.
        """
        self._work = work
        self._draws = draws
        self._call_context = CallContext()
        self._is_in_branch = False
        self.books = Books()

    def when(self, condition: tf.Tensor, function: Callable[[], Any]) -> None:
        """Calls a function, which may call this update, if a condition holds.

            update.when(update.step % 5 == 0, lambda: update.minimize(self.fools, batch, …))

        Args:
          condition: bool [], the same on all replicas, such as a function of `step` or of a norm.
          function: Takes no arguments; its result is not used.

        Raises:
          ConfigError: If the condition is no bool scalar, or the function takes arguments.
        """
        self._call_context.check("when")
        holds = _condition(condition)
        check_takes("The function of update.when", function, ())

        def make() -> Any:
            with self._in_branch(before):
                function()
                return self._work.carried(self.books)

        before = self._work.carried(self.books)
        self.books = Books.of(tf.cond(holds, make, lambda: before))

    @contextmanager
    def _in_branch(self, books: Any) -> Iterator[None]:
        """Makes verbs add to other sums, in the present graph, within the `with` block."""
        earlier = self._is_in_branch, self.books
        self._is_in_branch, self.books = True, Books.of(books)
        try:
            with self._call_context.in_present_graph(), self._draws.in_branch().forward():
                yield
        finally:
            self._is_in_branch, self.books = earlier


def _condition(given: Any) -> tf.Tensor:
    """Returns a condition as bool []."""
    try:
        condition = tf.convert_to_tensor(given)
    except (TypeError, ValueError):
        condition = None
    if condition is None or condition.dtype != tf.bool or condition.shape.rank != 0:
        raise ConfigError(
            "update.when: the condition must be a bool scalar, such as update.step % 5 == 0, got "
            f"{given!r:.80}."
        )
    return condition
