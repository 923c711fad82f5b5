"""Checks of the context and the graph in which a step calls a verb."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import tensorflow as tf

from ddl.errors import ConfigError
from ddl.step.verbs.misuse import MustEnter


class CallContext:
    """The context and the graph in which a step calls its verbs, and which weights are moved."""

    def __init__(self) -> None:
        """Takes the current graph and context as those of the step."""
        self._graph = tf.compat.v1.get_default_graph()
        # Replica context of the step: None under a strategy, else TensorFlow's default context.
        self._context = tf.distribute.get_replica_context()
        self._moved: set[int] = set()
        self._waiting: list[MustEnter] = []
        self._has_ended = False

    @property
    def has_moved(self) -> bool:
        """Whether any weights are moved."""
        return bool(self._moved)

    @contextmanager
    def in_present_graph(self) -> Iterator[None]:
        """Allows verbs in the current graph, that of a branch, within the `with` block."""
        earlier, self._graph = self._graph, tf.compat.v1.get_default_graph()
        try:
            yield
        finally:
            self._graph = earlier

    @contextmanager
    def moving(self, variables: Sequence[tf.Variable]) -> Iterator[None]:
        """Counts variables as moved within the `with` block."""
        own = set(map(id, variables))
        self._moved |= own
        yield
        self._moved -= own

    def must_enter(self, moved: AbstractContextManager[None]) -> MustEnter:
        """Returns the context manager of `moved`, whose `with` block must be entered."""
        return MustEnter(moved, self._waiting)

    def end(self) -> None:
        """Ends the step: no verb may be called any more.

        Raises:
          ConfigError: If a call of `moved` was not used in a `with` statement.
        """
        self._has_ended = True
        if self._waiting:
            raise ConfigError(
                "update.moved moves nothing unless it is used in a `with` statement: "
                "with update.moved(model, gradients):"
            )

    def check(self, verb: str) -> None:
        """Raises ConfigError after the step, or in another context or graph than its own."""
        if self._has_ended:
            raise ConfigError(
                f"update.{verb} was called after its step had ended. Call it in step(update, "
                "batch), which gets a new update each time, and keep no update."
            )
        if tf.distribute.get_replica_context() is not self._context:
            raise ConfigError(
                f"update.{verb} was called within a loss or `strategy.run`. Call it in the step "
                "itself, which runs once for all replicas."
            )
        if tf.compat.v1.get_default_graph() is not self._graph:
            raise ConfigError(
                f"update.{verb} was called within tf.cond, tf.while_loop or tf.function, whose "
                "graph the update cannot use. Use update.when(condition, function), or a "
                "Python `for`."
            )

    def check_not_moved(self, verb: str, variables: Sequence[tf.Variable]) -> None:
        """Raises ConfigError if a variable is moved."""
        if any(id(variable) in self._moved for variable in variables):
            raise ConfigError(
                f"update.{verb} would change weights within `with update.moved(…)`, which restores "
                f"them afterwards. Call update.{verb} after the block."
            )
