"""What can be wrong with data that no source can see by itself."""

import contextlib
import re
from collections.abc import Iterator, Mapping

import tensorflow as tf

from ddl.errors import DataError


def check_same_features(
    train: dict[str, tf.TensorSpec], evaluation: dict[str, tf.TensorSpec]
) -> None:
    """Raises a DataError unless evaluation data have the features of the training data."""
    for name, spec in train.items():
        if name not in evaluation:
            raise DataError(f"the evaluation data have no feature {name!r}, the training data do")
        if evaluation[name].shape != spec.shape:
            raise DataError(
                f"the feature {name!r} has shape {evaluation[name].shape} in the evaluation data "
                f"and {spec.shape} in the training data"
            )


def checked_finite(features: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    """The features, for a graph that stops with a message if one holds NaN or infinity."""
    return {
        name: tf.debugging.check_numerics(values, f"the feature {name!r} holds NaN or infinity")
        if values.dtype.is_floating
        else values
        for name, values in features.items()
    }


@contextlib.contextmanager
def data_errors() -> Iterator[None]:
    """Turns what TensorFlow says of bad data, in a page of graph, into a few words."""
    try:
        yield
    except (
        tf.errors.InvalidArgumentError,
        tf.errors.UnknownError,
        tf.errors.DataLossError,
        tf.errors.NotFoundError,
        tf.errors.OutOfRangeError,
    ) as error:
        # The reason stands between the trace of the graph and the name of its node; or it is our
        # own, raised in a Python function that the graph called.
        text = str(error.message)
        own = re.findall(r"ddl\.errors\.DataError: (.*)", text)
        reason = own[-1] if own else text.split("[[{{node")[0].strip().splitlines()[-1].strip()
        raise DataError(f"a batch of the data could not be made or used: {reason}") from None
