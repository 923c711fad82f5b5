"""Short messages, with remedies, for two of TensorFlow's errors."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import tensorflow as tf

from ddl.errors import ConfigError, DdlError, DeviceError

_OUT_OF_MEMORY = re.compile(r"^.*(?:\bOOM\b|out of memory|failed to allocate).*$", re.I | re.M)
_NOT_DETERMINISTIC = re.compile(r"^.*(?:\bdeterminis(?:m|tic)\b).*$", re.I | re.M)
_OF_TENSORFLOW = re.compile(r"\{\{function_node [^}]*\}\}| *\[Op:.*")


@contextmanager
def device_errors() -> Iterator[None]:
    """Converts two of TensorFlow's errors into short ones with a remedy.

    Raises:
      DeviceError: If a device ran out of memory in the `with` block.
      ConfigError: If an operation has no deterministic kernel although operations must be
        deterministic.
    """
    try:
        yield
    except (tf.errors.OpError, RuntimeError) as error:  # the latter while a function is traced
        is_full = isinstance(error, tf.errors.ResourceExhaustedError)
        found = (_OUT_OF_MEMORY if is_full else _NOT_DETERMINISTIC).search(str(error))
        if found is None or isinstance(error, DdlError):
            raise
        reason = _OF_TENSORFLOW.sub("", found[0]).strip().rstrip(".")
        if is_full:
            raise DeviceError(
                f"A device ran out of memory: {reason}. Raise accumulation_steps (macro "
                "ACCUMULATION_STEPS), which splits an update alone; lower the global batch size; "
                "use more devices; or keep data on the host (Trainer.data_on_device=False)."
            ) from error
        raise ConfigError(
            f"Deterministic operations refuse one: {reason}. Replace it, or leave out "
            "--deterministic_ops (enable_op_determinism): then runs on GPUs repeat up to rounding."
        ) from error
