"""Errors for a task or model that holds tensors of an earlier trace."""

from collections.abc import Iterator
from contextlib import contextmanager

from ddl.errors import ConfigError


@contextmanager
def explaining_stale_traces() -> Iterator[None]:
    """Replaces TensorFlow's error for tensors of an earlier trace by one with a remedy.

    Raises:
      ConfigError: If the `with` block uses such a tensor.
    """
    try:
        yield
    except (TypeError, ValueError) as error:
        if "out of scope" not in str(error):
            raise
        raise ConfigError(
            "the task or the model uses a tensor of an earlier trace, kept on an attribute or by a "
            "tf.function of its own that another trainer traced, or a call in training beforehand. "
            "Make task and model anew for each Trainer, keep no tensors, and leave such a "
            f"tf.function out: the trainer compiles the whole step. ({str(error).splitlines()[0]})"
        ) from error
