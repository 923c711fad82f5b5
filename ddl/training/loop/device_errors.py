"""Messages for errors of devices and compilers, which TensorFlow's tracebacks hide."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import tensorflow as tf

from ddl.errors import ConfigError, DeviceError

_OUT_OF_MEMORY = re.compile(r"^.*(?:\bOOM\b|out of memory|failed to allocate).*$", re.I | re.M)
# Texts of all kernels and Python functions that refuse determinism in TensorFlow 2.21.
_NOT_DETERMINISTIC = re.compile(
    r"^.*(?:determinism is not yet supported|determinis\w+ .*not (?:currently )?available|"
    r"not .*deterministic (?:XLA )?implementation|is not deterministic|"
    r"determinism is enabled|determinism is required).*$",
    re.I | re.M,
)
_NOT_COMPILED = re.compile(
    r"Detected unsupported operations when trying to compile graph \S+ on \S+: (\w+) (\(.*?\))\{\{"
)
_NODE = re.compile(r"\{\{node ([^}]+)\}\}")
_OF_TENSORFLOW = re.compile(r"\{\{function_node [^}]*\}\}| *\[Op:.*")


@contextmanager
def device_errors() -> Iterator[None]:
    """Converts three of TensorFlow's errors into short ones with a remedy.

    Raises:
      DeviceError: If a device ran out of memory in the `with` block.
      ConfigError: If an operation has no deterministic kernel although `--deterministic_ops` is
        given, or XLA cannot compile an operation.
    """
    try:
        yield
    except tf.errors.ResourceExhaustedError as error:
        if (reason := _OUT_OF_MEMORY.search(str(error.message))) is None:
            raise
        raise DeviceError(
            f"A device ran out of memory: {_line(reason)}. Raise ACCUMULATION_STEPS, which "
            "splits the same update into smaller microbatches; lower GLOBAL_BATCH_SIZE; use more "
            "devices; or keep the data on the host (data_on_device=False of the Trainer)."
        ) from error
    except (
        tf.errors.UnimplementedError,
        tf.errors.InvalidArgumentError,
        tf.errors.FailedPreconditionError,
    ) as error:
        text = str(error.message)
        if found := _NOT_COMPILED.search(text):
            raise ConfigError(
                f"XLA cannot compile the operation {found[1]} {found[2]}. Leave out jit_compile "
                "and TF_XLA_FLAGS, or replace the operation."
            ) from error
        _raise_if_not_deterministic(text, error)
        raise
    except RuntimeError as error:  # raised while a function is traced
        _raise_if_not_deterministic(str(error), error)
        raise


def _raise_if_not_deterministic(text: str, error: Exception) -> None:
    if (reason := _NOT_DETERMINISTIC.search(text)) is None:
        return
    node = _NODE.search(text)
    place = f" at {node[1]}" if node else ""
    raise ConfigError(
        f"--deterministic_ops refuses an operation{place}: {_line(reason)}. Replace the "
        "operation, or leave the flag out: then runs on GPUs repeat up to rounding."
    ) from error


def _line(found: re.Match[str]) -> str:
    return _OF_TENSORFLOW.sub("", found[0]).strip().rstrip(".")
