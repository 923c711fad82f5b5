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
            "The task or the model uses a tensor of an earlier trace. It is kept on an attribute, "
            "or by a tf.function that was traced by another Trainer or by an earlier call with "
            "training=True. Create a new task and model for each Trainer, keep no tensors on "
            "attributes, and remove this tf.function: the Trainer compiles the whole step. "
            f"({str(error).splitlines()[0]})"
        ) from error
