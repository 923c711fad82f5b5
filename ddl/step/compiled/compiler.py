"""Compilation of the pieces of a training loop or of an evaluation (`--jit_compile`).

Forward and backward pass of each microbatch are one piece on each replica, the update is another.
Collectives stay outside: all replicas must start them in the same order, but XLA orders the
operations of a piece as it likes.

While a loop is traced, each piece is lowered to XLA for the device at hand, which takes far less
time than to compile it. A piece that XLA cannot compile is therefore found before the first update.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

import keras
import tensorflow as tf
from absl import logging
from tensorflow.python.framework.config import is_op_determinism_enabled

from ddl.choices import JitCompile
from ddl.distribution.path import path_of
from ddl.distribution.traits import traits_of
from ddl.errors import ConfigError
from ddl.microbatch import CannotCompileError, is_compiled
from ddl.step.compiled.lowering import why_not_compiled
from ddl.step.compiled.one_replica import alone, is_first_replica

_Result = TypeVar("_Result")


class Compiler:
    """Compiles pieces, or leaves them as they are.

    Attributes:
      is_on: Whether pieces are compiled. `auto` turns it off at a piece that XLA cannot compile.
    """

    def __init__(self, choice: JitCompile, strategy: tf.distribute.Strategy, what: str):
        """Decides whether to compile.

        Args:
          choice: `on`, `off`, or `auto`: on for GPUs, off for CPUs, and off with deterministic
            operations, which XLA does not know all.
          strategy: The strategy.
          what: Description of the loop for errors, such as "training".

        Raises:
          ConfigError: If `choice` is `on` and the strategy keeps variables away from the replicas.
        """
        self._required = choice == "on"
        self._what = what
        traits = traits_of(strategy)
        apart = traits.asynchronous or traits.shares_variables
        if apart and self._required:
            raise ConfigError(
                "--jit_compile=on needs the weights on the device of each replica, got "
                f"{type(strategy).__name__}, which keeps them elsewhere. Leave --jit_compile out, "
                "or choose another --strategy, such as mirrored."
            )
        wanted = choice != "off" and path_of(strategy).can_compile
        self._is_alone = strategy.num_replicas_in_sync == 1
        self.is_on = wanted and not apart and (self._required or _is_faster(strategy))

    def __call__(self, function: Callable[[], _Result]) -> _Result:
        """Returns the result of a piece, compiled if that is on. In a graph, on one replica.

        Args:
          function: The piece. It may read tensors of the present graph; it must make its tapes.

        Raises:
          CannotCompileError: If XLA cannot compile it.
        """
        if not self.is_on or is_compiled():
            return function()
        compiled = tf.function(function, autograph=False, jit_compile=True)
        try:
            concrete = compiled.get_concrete_function()
        except RuntimeError as error:
            if "merge_call" not in str(error):
                raise
            raise CannotCompileError(
                "a layer, ddl.gather in a loss, or the optimizer communicates across replicas, "
                "which must stay outside of compiled code"
            ) from error
        if not all(map(_is_static, concrete.captured_inputs)):
            return function()
        if is_first_replica() and (reason := why_not_compiled(concrete)):
            raise CannotCompileError(*reason)
        return concrete()

    @property
    def is_whole(self) -> bool:
        """Whether an update is one piece; `whole` finds out whether XLA can compile it."""
        return self.is_on and self._is_alone

    def whole(
        self, in_one_piece: Callable[[], _Result], in_pieces: Callable[[], _Result]
    ) -> _Result:
        """Returns the result of updates: of one replica in one piece, else in several.

        Nothing stands between the pieces of a replica that is alone, and XLA makes fewer kernels of
        one piece. An update of which XLA cannot compile some part is left in several pieces.

        Args:
          in_one_piece: Makes the updates by a call of this object. Cross-replica context, in a
            graph.
          in_pieces: Makes the same updates; its pieces call this object.
        """
        if self.is_whole and not is_compiled():
            with suppress(CannotCompileError):
                return in_one_piece()
            self._is_alone = False
        return in_pieces()

    def of_update(
        self,
        function: Callable[[], _Result],
        variables: Sequence[keras.Variable],
        optimizers: Sequence[keras.optimizers.Optimizer],
    ) -> _Result:
        """Returns the result of a piece that changes variables, as `__call__`. Replica context.

        Args:
          function: The piece. It changes each variable to the same value on all replicas.
          variables: Variables of Keras that it reads or changes, without those of optimizers.
          optimizers: Optimizers that it applies.
        """

        def on_own_copies() -> _Result:
            with alone(variables, optimizers):
                return function()

        return self(on_own_copies) if self.is_on and not is_compiled() else function()

    def tracing(self, trace: Callable[[], _Result]) -> _Result:
        """Calls a function that traces pieces; again without compilation if that fails. Eager.

        Args:
          trace: The function. A failed trace must have no effects.

        Raises:
          ConfigError: If XLA cannot compile a piece and the choice is `on`.
        """
        try:
            return trace()
        except CannotCompileError as error:
            if self._required:
                raise ConfigError(
                    f"--jit_compile=on needs operations that XLA can compile, but in "
                    f"{self._what} {error.reason}. {error.remedy or 'Replace the operation.'} Or "
                    "pass --jit_compile=auto, which then goes without XLA."
                ) from None
            self.is_on = False
            logging.warning(
                "%s is not compiled by XLA: %s. %s--jit_compile=off hides this line.",
                self._what.capitalize(),
                error.reason,
                f"{error.remedy} " if error.remedy else "",
            )
        return trace()


def _is_faster(strategy: tf.distribute.Strategy) -> bool:
    """Returns whether `auto` compiles."""
    return path_of(strategy).compiles and not is_op_determinism_enabled()


def _is_static(tensor: tf.Tensor) -> bool:
    """Returns whether XLA compiles for this tensor once; else it would for each shape.

    The number of rows of a sparse gradient varies from update to update.
    """
    return tensor.dtype == tf.resource or tensor.shape.is_fully_defined()
