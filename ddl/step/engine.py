"""What an update computes with: its plan, the gradient of a loss, and optimizers that apply it."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from ddl.optimizers.checks import refusing_reductions
from ddl.optimizers.fused import by_kernels
from ddl.optimizers.groups import Group
from ddl.step import clipping
from ddl.step.clipping import Gradient, Variables
from ddl.step.global_gradient import GlobalGradient
from ddl.step.loss import Loss
from ddl.step.sharding import apply_to_shares
from ddl.tasks.gather import MicrobatchesError
from ddl.tasks.parts import each_once
from ddl.tasks.task import LossFunction

BUILT_IN = "per_example"
"""Name of the loss of the built-in step."""

Groups = Mapping[str, Mapping[str, Group]]
"""The Trainer's optimizers by both names (`ddl.optimizers.groups.groups_by_name`)."""

LossOf = Callable[[LossFunction, str], Loss]
"""Probes a loss in training: takes the function and the name of the source."""


class Applied(NamedTuple):
    """An optimizer with the variables that it updates.

    Attributes:
      optimizer: The optimizer.
      variables: The variables that it updates, each once.
      times: Number of its updates in a step; None if that depends on a tensor.
    """

    optimizer: keras.optimizers.Optimizer
    variables: Variables
    times: int | None

    def indices(self, variables: Variables) -> list[int]:
        """Returns the indices of those of some variables that it updates."""
        updated = set(map(id, self.variables))
        return [index for index, variable in enumerate(variables) if id(variable) in updated]


@dataclasses.dataclass
class StepPlan:
    """The losses of an update, and the optimizers that apply their gradients.

    Attributes:
      groups: The parameter groups of each optimizer of the step, by both names.
      loss_of: Probes a loss.
      losses: The losses whose gradients it computes, by name.
      means: The functions that it averages or sums, by name.
      applied: The optimizer of each group with its variables, by the name of the group.
      batches: Number of batches that an update reads of each source, by its name.
      calls: The verbs that the task's step calls (`ddl.step.update.Update.calls`), in each trace
        the same.
      inputs: Specs of the arguments of each subclassed model that a loss calls, by its id.
    """

    groups: Groups
    loss_of: LossOf
    losses: dict[str, Loss] = dataclasses.field(default_factory=dict)
    means: dict[str, Loss] = dataclasses.field(default_factory=dict)
    applied: Mapping[str, Applied] = dataclasses.field(default_factory=dict)
    batches: Mapping[str, int] = dataclasses.field(default_factory=lambda: {"": 1})
    calls: Any = None
    inputs: Mapping[int, list[Any]] = dataclasses.field(default_factory=dict)

    @property
    def trained(self) -> list[keras.Variable]:
        """The variables of all optimizers, each once."""
        return each_once(v for one in self.applied.values() for v in one.variables)

    @property
    def normalizing(self) -> list[keras.layers.BatchNormalization]:
        """The layers that take moments of a microbatch in training."""
        losses = (*self.losses.values(), *self.means.values())
        every = each_once(layer for one in losses for layer in one.form.layers)
        return [x for x in every if isinstance(x, keras.layers.BatchNormalization)]

    def loss(self, known: dict[str, Loss], function: LossFunction, name: str, source: str) -> Loss:
        """Returns the loss of a function in this trace; probes it when its name is new.

        Args:
          known: `losses` or `means`.
          function: The function, which each trace may define anew.
          name: Name of the loss.
          source: Name of the source of its examples.
        """
        if name not in known:
            # Outside of the trace, by a thread: tf.init_scope would stop the tapes of the loss.
            policy = keras.config.dtype_policy()  # of this thread
            with ThreadPoolExecutor(1, "", keras.config.set_dtype_policy, (policy,)) as outside:
                known[name] = outside.submit(self.loss_of, function, source).result()
        return dataclasses.replace(known[name], function=function)

    def check_microbatches(self, microbatches: int) -> None:
        """Raises MicrobatchesError if a loss needs a batch as a whole that is split.

        It gathers rows, or its layers assign to other variables than moments of BatchNormalization.
        """
        for loss in (*self.losses.values(), *self.means.values()) if microbatches > 1 else ():
            if loss.form.gathers:
                raise MicrobatchesError(
                    f"{loss.where} calls ddl.gather, which needs the whole global batch"
                )
            if written := loss.form.written:
                raise MicrobatchesError(
                    f"The forward pass of {loss.where} assigns to {' and '.join(written)}, once "
                    "for the global batch"
                )


@dataclasses.dataclass(frozen=True)
class Engine:
    """Applies gradients of the global batch. Cross-replica context, in a graph.

    Attributes:
      plan: The losses, and the optimizers with the variables that each updates.
      gradient: Computes the gradient of a loss.
      clips: Largest global norm of the gradients that each optimizer applies, or None, by its name
        in the step.
    """

    plan: StepPlan
    gradient: GlobalGradient
    clips: Mapping[str, float | None]

    def apply(self, optimizer: str, variables: Variables, values: Any, factor: Any) -> tf.Tensor:
        """Applies a gradient: factor → penalties → clip → optimizers.

        Parameter groups share one gradient: penalties and clipping see all of it, and each
        optimizer then updates the variables of its group.

        Args:
          optimizer: Name of the optimizer in the step.
          variables: The variables.
          values: The gradient, one value for each; or in shares.
          factor: A factor that is missing in it, [], or None.

        Returns:
          The global norm before clipping, float64 []; 0 without a limit of the norm.
        """
        gradient, clip = self.gradient, self.clips[optimizer]
        groups = (self.plan.applied[group] for group in self.plan.groups[optimizer])
        applied = [one for one in groups if one.indices(variables)]
        optimizers = [one.optimizer for one in applied]

        def on_replica(values: Any, factor: Any) -> tf.Tensor:
            piece = functools.partial(_apply, values, factor, variables, applied, clip)
            return gradient.compiler.of_update(piece, variables, optimizers)

        with tf.name_scope("ddl_update"):
            if gradient.sharding is not None:
                return apply_to_shares(gradient.sharding, values, factor, variables, applied, clip)
            with refusing_reductions(gradient.strategy), by_kernels(optimizers):
                norms = gradient.strategy.run(on_replica, args=(values, factor))
            return gradient.strategy.experimental_local_results(norms)[0]


def _apply(
    values: list[Gradient], factor: Any, variables: Variables, applied: list[Applied], clip: Any
) -> tf.Tensor:
    """Applies a gradient that all replicas hold; returns its norm, as `apply`. Replica context."""
    if factor is not None:
        values = clipping.multiply(values, factor)
    values = clipping.add_regularization(values, variables)
    norm = tf.zeros([], tf.float64)
    if clip is not None:
        squared = clipping.squared_norm(values)
        values, norm = clipping.clip_by_global_norm(values, clip, squared)
    for one in applied:
        pairs = [(values[index], variables[index]) for index in one.indices(variables)]
        # Not `apply`: a user's may override either, and `apply_gradients` calls `apply`.
        one.optimizer.apply_gradients(pairs)
    return tf.cast(norm, tf.float64)
