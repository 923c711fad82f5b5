"""Checks of a Trainer with `batch_shards`, before anything is built."""

from collections.abc import Mapping

import tensorflow as tf

from ddl.distribution.arithmetic import fix_arithmetic
from ddl.errors import ConfigError
from ddl.step.shards.checks import check_number, check_options
from ddl.training.checks.arguments import Options


def check_shards(options: Options, strategy: tf.distribute.Strategy) -> None:
    """Checks the arguments and fixes the arithmetic of this process, if shards are asked for.

    Args:
      options: The arguments.
      strategy: The strategy.

    Raises:
      ConfigError: If the devices or another argument exclude shards, a global batch does not divide
        into equal shards, or TensorFlow already started with several threads in a kernel.
    """
    if options.batch_shards is None:
        return
    check_number(options.batch_shards, strategy)
    check_options(options)
    given = options.global_batch_size
    for size in given.values() if isinstance(given, Mapping) else [given]:
        unit = options.batch_shards * options.accumulation_steps
        if size % unit:
            lower = size // unit * unit
            nearest = " or ".join(str(n) for n in (lower, lower + unit) if n)
            raise ConfigError(
                f"The global batch size must be a multiple of {unit} ({options.batch_shards} "
                f"shards × {options.accumulation_steps} accumulation steps), got {size}. Use "
                f"{nearest}, or fewer shards."
            )
    fix_arithmetic()
