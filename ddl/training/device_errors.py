"""Short messages, with remedies, for three of TensorFlow's errors."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import tensorflow as tf

from ddl.errors import ConfigError, DdlError, DeviceError

_OUT_OF_MEMORY = re.compile(r"^.*(?:\bOOM\b|out of memory|failed to allocate).*$", re.I | re.M)
_NOT_DETERMINISTIC = re.compile(r"^.*(?:\bdeterminis(?:m|tic)\b).*$", re.I | re.M)
_NODE = re.compile(r"\{\{node ([^}]+)\}\}")
_OF_TENSORFLOW = re.compile(r"\{\{function_node [^}]*\}\}| *\[Op:.*")


@contextmanager
def device_errors() -> Iterator[None]:
    """Converts three of TensorFlow's errors into short ones with a remedy.

    Raises:
      DeviceError: If a device ran out of memory in the `with` block.
      ConfigError: If an operation has no deterministic kernel although `--deterministic_ops` is
        given, or the task uses a tensor of an earlier trace.
    """
    try:
        yield
    except DdlError:
        raise
    except tf.errors.ResourceExhaustedError as error:
        if (reason := _OUT_OF_MEMORY.search(str(error.message))) is None:
            raise
        raise DeviceError(
            f"A device ran out of memory: {_line(reason)}. Raise ACCUMULATION_STEPS, which "
            "splits the same update into smaller microbatches; lower GLOBAL_BATCH_SIZE; use more "
            "devices; or keep the data on the host (data_on_device=False of the Trainer)."
        ) from error
    except (tf.errors.OpError, RuntimeError) as error:  # the latter while a function is traced
        text = str(error)
        if (reason := _NOT_DETERMINISTIC.search(text)) is None:
            raise
        node = _NODE.search(text)
        raise ConfigError(
            f"--deterministic_ops refuses an operation{f' at {node[1]}' if node else ''}: "
            f"{_line(reason)}. Replace the operation, or leave the flag out: then runs on GPUs "
            "repeat up to rounding."
        ) from error
    except (TypeError, ValueError) as error:
        if "out of scope" not in str(error):
            raise
        raise ConfigError(
            "The task or the model uses a tensor of an earlier trace. It is kept on an attribute, "
            "or by a tf.function that was traced by another Trainer or by an earlier call with "
            "training=True. Create a new task and model for each Trainer, keep no tensors on "
            "attributes, and remove this tf.function: the Trainer compiles the whole step. "
            f"({str(error).splitlines()[0]})"
        ) from error


def _line(found: re.Match[str]) -> str:
    return _OF_TENSORFLOW.sub("", found[0]).strip().rstrip(".")
