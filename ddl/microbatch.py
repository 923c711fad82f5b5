"""The current microbatch: which rows of which global batch a replica computes.

Two kinds of layers need more than their input to compute the same result on any number of
replicas. Layers that draw random numbers need each example's position in the global batch. Layers
that compute batch statistics need the mask of the padding. The trainer sets the current microbatch
around the task's forward and backward pass; outside of a trainer there is none.
"""

import copy
import dataclasses
import re
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.python.ops import control_flow_util

from ddl.errors import ConfigError

# tf.distribute traces each replica in its own thread.
_OF_THREAD = threading.local()


def current() -> "Microbatch | None":
    """Returns the microbatch whose pass this thread traces; None outside of a trainer."""
    return getattr(_OF_THREAD, "microbatch", None)


def is_compiled() -> bool:
    """Returns whether XLA compiles what this thread traces.

    The function is private to TensorFlow; tests/test_random.py guards it.
    """
    return control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph())


@contextmanager
def entered(microbatch: "Microbatch | None") -> Iterator[None]:
    """Makes a microbatch, or none, the current one of the thread within the `with` block."""
    earlier, _OF_THREAD.microbatch = current(), microbatch
    try:
        yield
    finally:
        _OF_THREAD.microbatch = earlier


class Drawn(NamedTuple):
    """A draw of random numbers in a probe.

    Attributes:
      layer: Name of the layer that drew.
      shape: Shape of the numbers; None for sizes that are not static.
    """

    layer: str
    shape: tuple[int | None, ...]


@contextmanager
def without_traces_of_the_user() -> Iterator[None]:
    """Runs a task's own `tf.function`s untraced within the `with` block.

    A trace holds the numbers that its microbatch draws: training would reuse that of a trial, and
    a second loss of a step that of the first. Untraced, each function runs as a part of its caller.
    """
    # TensorFlow has this switch for the process alone. Tried in its place, to trace the functions
    # anew: `tf.compat.v1.device` with a callable, which the key of a trace leaves out where eager
    # mode is outermost (nothing was traced anew); a `tf.Graph` around each pass, to which
    # `tf.init_scope` then leads, and which the eager `build` cannot have; the thread's context of
    # saving, whose policy is part of the key, but which cannot be nested, as the probe of a loss is
    # in a rehearsal, and makes variables of parameter servers behave as in a save.
    earlier = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(True)
    try:
        with warnings.catch_warnings():  # tf.data says that its functions stay traced
            warnings.filterwarnings("ignore", ".*experimental_run_functions_eagerly", UserWarning)
            yield
    finally:
        tf.config.run_functions_eagerly(earlier)


@dataclasses.dataclass(kw_only=True)
class Microbatch:
    """The rows that one replica computes at once. Replica context.

    Attributes:
      seed: Seed of all random numbers.
      training: Whether this is a training pass. Training and evaluation draw different numbers.
      counter: uint64 [2], `ddl.random.batch_counter` of the global batch.
      first_row: Position of the first row in the global batch, int64 [] or a Python integer. The
        rows are consecutive.
      rows: Number of rows; static.
      mask: bool [rows], False for padding and for examples with weight 0; None if there are
        neither.
      held: In a probe, keeps what its first run computed across rows, and returns it in later
        runs (`ddl.training.probes`): it takes tensors, and whether their first dimension follows
        the rows. Else None.
      normalizing: In a probe, the BatchNormalization layers that took moments of the rows.
      own_moments: Whether BatchNormalization takes the moments of these rows alone; else it takes
        those of all replicas.
      drawn: In a probe, the draws so far by place and number; else None.
      placing: How many rows of each draw belong to each example, by place and number
        (`ddl.random.placing`); None where no probe has told.
      pass_number: Number of the pass in the step, each of which draws numbers of its own; the only
        pass of the built-in step has 0.
      weight: float32 [rows], the weights of the examples; None in a trial, where all are 1.
      step: Number of updates made so far, int64 []; None in a trial, where it is 0.
      gathering: How `ddl.gather` gets the rows of other replicas; None: from the replicas
        (`ddl.tasks.gather`).
      has_gathered: Whether this pass has called `ddl.gather`.
      remat: The parts of the models that the backward pass computes again (`ddl.step.remat`), or
        None.
      recomputes: Whether this is a second computation, in the backward pass.
    """

    seed: int
    training: bool
    counter: tf.Tensor
    first_row: tf.Tensor | int
    rows: int
    mask: tf.Tensor | None = None
    held: Callable[[Sequence[tf.Tensor], bool], list[tf.Tensor]] | None = None
    normalizing: list[Any] = dataclasses.field(default_factory=list)
    own_moments: bool = False
    drawn: dict[tuple[int, int], Drawn] | None = None
    placing: Mapping[tuple[int, int], int] | None = None
    pass_number: int = 0
    weight: tf.Tensor | None = None
    step: tf.Tensor | None = None
    gathering: Any = None
    has_gathered: bool = False
    remat: Any = None
    recomputes: bool = False
    # By the object that draws: the object itself, so that its id stays unique, its place in the
    # order of first draws, and the number of its draws.
    _calls: dict[Any, list[Any]] = dataclasses.field(default_factory=dict)
    _is_backward: bool = False

    def __post_init__(self) -> None:
        self._graph = tf.compat.v1.get_default_graph()
        self.is_eager = tf.executing_eagerly()

    def forward(self) -> AbstractContextManager[None]:
        """Makes this the current microbatch of the thread within the `with` block."""
        return entered(self)

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Does the same for the backward pass, where recomputed layers repeat their draws."""
        self._is_backward = True
        try:
            with self.forward():
                yield
        finally:
            self._is_backward = False

    @property
    def in_forward(self) -> bool:
        """Whether this is the forward pass itself, outside of loops, conditionals and functions."""
        return not self._is_backward and tf.compat.v1.get_default_graph() is self._graph

    @property
    def in_loop(self) -> bool:
        """Whether the current graph lies within a loop of the model.

        A loop body is traced once and runs many times, so a number assigned during the trace is the
        same in every iteration.
        """
        if re.search(r"\bloop_body(_\d+)?\b", tf.get_current_name_scope()):  # tf.vectorized_map
            return True
        graph = tf.compat.v1.get_default_graph()
        while graph is not self._graph and graph is not None:
            if type(graph).__name__ == "WhileBodyFuncGraph":
                return True
            graph = getattr(graph, "outer_graph", None)
        return False

    def rows_per_example(self, rows: Any, asking: str) -> int:
        """Returns how many of a layer's rows belong to each example.

        Args:
          rows: Number of rows of the layer; a tensor if it is not static.
          asking: Description of the caller, for the error.

        Raises:
          ConfigError: If `rows` is not a static multiple of the microbatch's rows.
        """
        if not isinstance(rows, int) or rows < self.rows or rows % self.rows:
            raise ConfigError(
                f"{asking} must have a fixed number of rows for each of the {self.rows} examples, "
                f"got {rows} rows. Keep the batch as the first dimension, with the rows of each "
                "example next to each other."
            )
        return rows // self.rows

    def copied(self) -> "Microbatch":
        """Returns a microbatch that draws the same numbers from here on, such as for a replica."""
        other = copy.copy(self)
        other._calls = {key: list(calls) for key, calls in self._calls.items()}
        return other

    def repeated(self, counter: tf.Tensor) -> "Microbatch":
        """Returns a copy for a second computation in the backward pass, from these draws on.

        Args:
          counter: The attribute `counter`, as a tensor of the backward pass.
        """
        other = self.copied()
        other.counter, other.remat = counter, None
        other._is_backward = other.recomputes = True
        return other

    def advance_to(self, other: "Microbatch") -> None:
        """Takes over the number of draws of a copy."""
        self._calls.update(other._calls)

    def call_number(self, owner: Any, layer: str) -> tuple[int, int]:
        """Counts the draws of an object in this pass, so that each draw has its own stream.

        Args:
          owner: Owner of a stream: an integer seed, or an object.
          layer: Name of what draws, for the error.

        Returns:
          The place of `owner` in the order of first draws, which is the same on every replica and
          in every run of the same model; and the number of its earlier draws in this pass.

        Raises:
          ConfigError: If the backward pass recomputes (tf.recompute_grad) an owner that did not
            draw exactly once in the forward pass, so that the draw to repeat is ambiguous.
        """
        key = ("integer", owner) if isinstance(owner, int) else id(owner)
        calls = self._calls.setdefault(key, [owner, len(self._calls), 0])
        _, place, count = calls
        if self.recomputes or not self._is_backward:
            calls[2] += 1
            return place, count
        if count != 1:
            raise ConfigError(
                f"Layer {layer!r} drew random numbers {count} times, but a layer that is "
                "recomputed in the backward pass (tf.recompute_grad) must draw exactly once. Use a "
                "separate layer for each call."
            )
        return place, 0


class CannotCompileError(BaseException):
    """Ends the trace of a compiled piece. An `except Exception` in a layer does not catch it.

    Attributes:
      reason: The operation with its layer, and why XLA cannot compile it; a clause without a full
        stop.
    """

    def __init__(self, reason: str):
        """Keeps the reason."""
        super().__init__(reason)
        self.reason = reason
