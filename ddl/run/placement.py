"""The placement of a run on devices."""

import dataclasses
from typing import Literal

import tensorflow as tf

from ddl.choices import JitCompile
from ddl.distribution.communication import Communication


@dataclasses.dataclass(frozen=True)
class Placement:
    """The settings of a run that come from flags, as arguments of the Trainer.

    Synchronous strategies compute the same updates up to rounding, unless a layer depends on the
    number of replicas. Under a ParameterServerStrategy updates are asynchronous.

    Attributes:
      strategy: The `tf.distribute` strategy.
      communication: Settings of the gradients' all-reduce.
      steps_per_loop: Updates per Python call; None adapts the number.
      data_on_device: Whether data arrays are kept on the devices; "auto" decides by size.
      jit_compile: Whether XLA compiles the updates; "auto" does on GPUs.
      shard_optimizer_state: Whether each replica keeps the slots of its share of the weights alone.
    """

    strategy: tf.distribute.Strategy
    communication: Communication
    steps_per_loop: int | None = None
    data_on_device: bool | Literal["auto"] = "auto"
    jit_compile: JitCompile = "auto"
    shard_optimizer_state: bool = False
