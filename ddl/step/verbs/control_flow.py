"""The control flow of a step: `when` and `repeat`, which carry the sums of the verbs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from ddl.errors import ConfigError, check_takes
from ddl.step.verbs.call_context import CallContext
from ddl.step.verbs.draws import StepDraws
from ddl.step.verbs.misuse import Guarded
from ddl.step.verbs.turns import Turns
from ddl.step.verbs.work import Books, Work


class ControlFlow(Guarded):
    """The part of an update that runs verbs in branches and in turns of a loop.

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
        self._turns = Turns()
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
            with self._inside(before, self._turns.in_branch()):
                function()
                return self._work.carried(self.books)

        before = self._work.carried(self.books)
        self.books = Books.of(tf.cond(holds, make, lambda: before))

    def repeat(self, times: int | tf.Tensor, function: Callable[[tf.Tensor], Any]) -> None:
        """Calls a function, which may call this update, several times, with new draws each time.

        Args:
          times: Number of turns, an integer; at most 4,096 for a repeat within a repeat, and at
            most 4,095 for one around another.
          function: Takes the number of the turn, int64 [], from 0; its result is not used.

        Raises:
          ConfigError: If `times` is not an integer, the function takes other arguments, or this is
            a repeat within two others, or one of two nested repeats has too many turns.
        """
        self._call_context.check("repeat")
        count = self._turns.check_repeat(times)
        check_takes("The function of update.repeat", function, ("turn",))
        if tf.get_static_value(count) == 0:
            return  # the verbs of no turn are not part of the step

        def body(turn: tf.Tensor, so_far: Any) -> Any:
            with self._inside(so_far, self._turns.in_turn(turn, count)):
                function(turn)
                return turn + 1, self._work.carried(self.books)

        start = (tf.zeros([], tf.int64), self._work.carried(self.books))
        self.books = Books.of(tf.while_loop(lambda turn, _: turn < count, body, start)[1])

    @contextmanager
    def _inside(self, books: Any, turns: Turns) -> Iterator[None]:
        """Makes verbs add to other sums, in the present graph, within the `with` block."""
        earlier = self._turns, self.books
        self._turns = turns
        self.books = Books.of(books)
        try:
            with self._call_context.in_present_graph(), self._draws.in_turn(turns.number).forward():
                yield
        finally:
            self._turns, self.books = earlier


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
