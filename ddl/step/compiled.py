"""Compilation of the pieces of a training loop or of an evaluation (`--jit_compile`).

Forward and backward pass of each microbatch are one piece on each replica, the update is another;
the update of sharded slots is none.
Collectives stay outside: all replicas must start them in the same order, but XLA orders the
operations of a piece as it likes.

While a loop is traced, each piece is lowered to XLA for the device at hand, its arguments known
only by shape and dtype. That takes far less time than to compile it, so a piece that XLA cannot
compile is found before the first update.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, TypeVar

import keras
import tensorflow as tf
from absl import logging
from tensorflow.python.distribute import distribute_lib
from tensorflow.python.eager import context
from tensorflow.python.framework.config import is_op_determinism_enabled

from ddl.choices import JitCompile
from ddl.distribution.devices import replica_devices
from ddl.distribution.path import path_of
from ddl.distribution.traits import traits_of
from ddl.errors import ConfigError
from ddl.microbatch import CannotCompileError, is_compiled
from ddl.optimizers.checks import refusing_reductions
from ddl.random import nodes_of

_Result = TypeVar("_Result")

# XLA draws other numbers than TensorFlow, but for Philox's words and the keys for them. Draws by
# a state are refused (`ddl.step.effects.check_stateless`).
_DRAWS = re.compile(
    r"^Stateless(Random(?!UniformFullIntV2|Get)|Truncated|Parameterized|Multinomial|Shuffle)"
)
_COLLECTIVE = re.compile(r"^Collective|^Nccl|^XlaAllReduce")


class Compiler:
    """Compiles pieces, or leaves them as they are.

    Attributes:
      is_on: Whether pieces are compiled. If XLA cannot compile a piece, `auto` leaves out the
        passes, and then all.
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
        traits, path = traits_of(strategy), path_of(strategy)
        apart = traits.asynchronous or traits.shares_variables
        if apart and self._required:
            raise ConfigError(
                "jit_compile=on needs the weights on the device of each replica, got "
                f"{type(strategy).__name__}, which keeps them elsewhere. Leave jit_compile out, "
                "or choose another strategy, such as mirrored."
            )
        self._tries_whole = strategy.num_replicas_in_sync == 1
        self._takes_passes = True
        wanted = self._required or (path.compiles and not is_op_determinism_enabled())
        self.is_on = wanted and choice != "off" and path.can_compile and not apart

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
        # XLA would compile anew for each number of rows of a sparse gradient.
        captures = concrete.captured_inputs
        if not all(x.dtype == tf.resource or x.shape.is_fully_defined() for x in captures):
            return function()
        if _local_replica() == 0:
            check_compiles(concrete)
        return concrete()

    def of_pass(self, function: Callable[[], _Result]) -> _Result:
        """Returns the result of a forward pass, with or without a backward pass, as `__call__`.

        Layers that communicate across replicas, and operations without a kernel, are there.
        """
        return self(function) if self._takes_passes else function()

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
        if self.is_on and self._tries_whole and not is_compiled():
            with suppress(CannotCompileError):
                return in_one_piece()
            self._tries_whole = False
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

        def on_local_copies() -> _Result:
            with as_only_replica(variables, optimizers):
                return function()

        return self(on_local_copies) if self.is_on and not is_compiled() else function()

    def tracing(self, trace: Callable[[], _Result]) -> _Result:
        """Calls a function that traces pieces; again with fewer compiled if that fails. Eager.

        Args:
          trace: The function. A failed trace must have no effects.

        Raises:
          ConfigError: If XLA cannot compile a piece and the choice is `on`.
        """
        while True:
            try:
                return trace()
            except CannotCompileError as error:
                if self._required:
                    raise ConfigError(
                        "jit_compile=on needs operations that XLA can compile, but in "
                        f"{self._what} {error.reason}. Replace the operation, or pass "
                        "jit_compile=auto, which then goes without XLA."
                    ) from None
                # The update is compiled all the same.
                self.is_on, self._takes_passes = self._takes_passes, False
                logging.warning(
                    "%s is not compiled by XLA%s: %s. jit_compile=off hides this line.",
                    self._what.capitalize(),
                    ", but for the update" if self.is_on else "",
                    error.reason,
                )


# ------------------------------------------------------------ one replica


def _local_replica() -> int:
    """Returns which replica of this process the thread traces; 0 for none."""
    # Private to TensorFlow, like those below; tests/step/test_compiled.py guards them.
    replica = tf.distribute.get_replica_context()
    if replica is not None:
        return int(replica._local_replica_id)
    updated = distribute_lib.get_update_replica_id()  # within `strategy.extended.update`
    return updated if isinstance(updated, int) else 0


@contextmanager
def as_only_replica(
    variables: Iterable[keras.Variable], optimizers: Sequence[keras.optimizers.Optimizer]
) -> Iterator[None]:
    """Makes this replica the only one within the `with` block, with its own copies of variables.

    Keras's optimizers update variables in cross-replica context, which a compiled piece cannot
    enter. Gradients are equal on all replicas, so each replica can update its own copies. Replica
    context; while the block is traced, no other thread traces.

    Args:
      variables: Variables of Keras that the block reads or writes, without those of optimizers.
      optimizers: Optimizers that it applies.

    Raises:
      ConfigError: If the block sums over the replicas.
    """
    replica = _local_replica()
    results = tf.distribute.get_strategy().experimental_local_results
    default = distribute_lib._get_default_strategy()
    replaced: list[tuple[Any, str, Any]] = []
    every = [*variables, *(v for optimizer in optimizers for v in optimizer.variables)]
    for variable in every:
        copies = results(variable._value)
        replaced.append((variable, "_value", copies[replica % len(copies)]))
    replaced += [(optimizer, "_distribution_strategy", default) for optimizer in optimizers]
    with ExitStack() as stack:
        stack.enter_context(tf.distribute.ReplicaContext(default, replica))
        stack.enter_context(refusing_reductions(default))
        for owner, name, value in replaced:  # past the owner's tracking of attributes
            stack.callback(vars(owner).__setitem__, name, vars(owner)[name])
            vars(owner)[name] = value
        yield


# ------------------------------------------------------------ lowering


def check_compiles(function: Any) -> None:
    """Lowers a function for the device on which it will run.

    Args:
      function: A concrete function of no arguments, whose captured tensors lie in the graph that
        is being traced.

    Raises:
      CannotCompileError: If XLA cannot compile it to the same results.
    """
    for node in nodes_of(function.graph.as_graph_def()):
        where = f"the operation {node.op} at {node.name}"
        if _COLLECTIVE.match(node.op):
            raise CannotCompileError(f"{where} communicates across replicas")
        if _DRAWS.match(node.op):
            raise CannotCompileError(
                f"{where} would draw other random numbers in XLA than in TensorFlow (keras.random, "
                "ddl.random and layers of Keras draw the same)"
            )
    given = [x if x.dtype != tf.resource else _eager(x) for x in function.captured_inputs]
    if any(x is None for x in given):
        return  # it uses variables that only live within the update
    specs = [tf.TensorSpec(x.shape, x.dtype) for x in given if x.dtype != tf.resource]

    @tf.function(autograph=False, jit_compile=True)
    def called(*values: tf.Tensor) -> list[tf.Tensor] | None:
        following, types = iter(values), [x.dtype for x in function.outputs]
        args = [x if x.dtype == tf.resource else next(following) for x in given]
        results = tf.raw_ops.StatefulPartitionedCall(args=args, Tout=types, f=function)
        return results if types else None

    try:
        with tf.init_scope(), tf.device(replica_devices(tf.distribute.get_strategy())[0]):
            lowered = called.get_concrete_function(*specs)
            context.context().get_compiler_ir(
                device_name=tf.zeros([]).device,
                platform_name=None,
                function_name=lowered.name,
                flat_args=specs,
                captured_inputs=lowered.captured_inputs,
                stage="stablehlo_serialized",
            )
    except (tf.errors.OpError, ValueError) as error:
        nodes = ", ".join(dict.fromkeys(re.findall(r"\{\{node ([^}]+)\}\}", str(error))))
        reason = f"{str(error).strip().splitlines()[0]:.300}"
        raise CannotCompileError(f"XLA fails at {nodes or 'an operation'}: {reason}") from None


def _eager(tensor: Any) -> Any:
    """Returns the eager tensor that a graph's tensor captures, through outer graphs, or None."""
    while tensor is not None and not hasattr(tensor, "numpy"):
        captures = getattr(tensor.graph, "captures", ())
        tensor = next((outer for outer, inner in captures if inner is tensor), None)
    return tensor
