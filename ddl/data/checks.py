"""Checks of evaluation data against training data, and errors of data that are being read."""

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from absl import logging

from ddl.errors import DataError
from ddl.user_code import place_of, repeats

# Texts of errors that the data cause: iterators name themselves, and kernels name the refused
# value.
_OF_DATA = re.compile(
    r"with iterator: Iterator|\{\{node [^}]*Iterator|\[Op:Iterator|"
    r"MultiDeviceIteratorGetNextFromShard|Feature '|"
    r"Received a label value|\bindices\S* = (\] \[)?[^] ]+(\] \[)? is not in \["
)

_KINDS_OF_DATA = (
    tf.errors.InvalidArgumentError,
    tf.errors.UnknownError,
    tf.errors.DataLossError,
    tf.errors.NotFoundError,
    tf.errors.OutOfRangeError,
    tf.errors.FailedPreconditionError,
    tf.errors.InternalError,
)

# A token or category that a layer looks up, and the node that does so. An assertion of a layer puts
# each piece of its message in brackets.
_BEYOND_TABLE = re.compile(
    r"\bindices\S* = (?:\] \[)?(-?\d+)(?:\] \[)? is not in \[0, (\d+)\)\]?\s*"
    r"\[\[\{\{node ([^}]*)\}\}"
)

# A node with an error, which may lie in a function that a function of the data calls.
_NODE = re.compile(r"\[\[\{\{(?:function_node [^}]*\}\}\{\{)?node")

_BEFORE_REASON = re.compile(
    r"^(\(\d+\) [A-Z_]+: *)?(\{\{function_node [^}]*\}\} *)?"
    r"(Error in user-defined function passed to .* with iterator: \S+: *)?"
)


# tf.debugging.Assert writes its message in this form, with a backslash before each quote, and each
# piece of it in brackets.
_ASSERTED = re.compile(r"^assertion failed: \[(.*)\]$")


def check_same_features(
    train: dict[str, tf.TensorSpec], evaluation: dict[str, tf.TensorSpec]
) -> None:
    """Checks that the evaluation data have the features of the training data, in the same shapes.

    Args:
      train: `element_spec` of the training data.
      evaluation: `element_spec` of the evaluation data, which may have further features.

    Raises:
      DataError: If a feature is missing or has another shape.
    """
    for name, spec in train.items():
        if name not in evaluation:
            raise DataError(
                f"Feature {name!r} is in the training data but missing from the evaluation data. "
                "Add it to the evaluation data."
            )
        if evaluation[name].shape != spec.shape:
            raise DataError(
                f"Feature {name!r} must have the same shape in both data sets, but it has shape "
                f"{spec.shape} in the training data and {evaluation[name].shape} in the evaluation "
                "data. Resize, pad or crop it to one shape."
            )
        warn_of_another_kind(name, spec.dtype, evaluation[name].dtype)


def warn_of_another_kind(name: str, train: tf.DType, other: tf.DType) -> None:
    """Logs a warning if a feature is an integer in one data set and a float in another.

    No error, since the values may have the same scale all the same.

    Args:
      name: Name of the feature.
      train: Its dtype in the training data.
      other: Its dtype in other data.
    """
    if (train.is_integer and other.is_floating) or (train.is_floating and other.is_integer):
        logging.warning(
            "Feature %r is %s in the training data, but %s in other data, so its values may have "
            "another scale. Convert both alike, with .astype.",
            *(name, train.name, other.name),
        )


def check_same_classes(train: Any, evaluation: Any) -> None:
    """Checks that the labels of sources whose items name their classes mean the same.

    Args:
      train: Source of the training data.
      evaluation: Source of the evaluation data.

    Raises:
      DataError: If the classes, or their order, differ.
    """
    ours, theirs = (
        getattr(getattr(source, "items", None), "class_names", None)
        for source in (train, evaluation)
    )
    if ours is not None and theirs is not None and list(ours) != list(theirs):
        raise DataError(
            f"The classes of the training data are {', '.join(ours)}, those of the evaluation "
            f"data {', '.join(theirs)}, so equal labels mean different classes. Give both the same "
            "class folders, or pass the same class_names to both."
        )


@contextlib.contextmanager
def data_errors(*sources: Any) -> Iterator[None]:
    """Converts TensorFlow's errors about bad data into a short DataError.

    Other errors of TensorFlow pass through: of devices, compilers, collectives and tasks. So do
    those of disks and networks, which a restart may not meet again.

    Args:
      *sources: Sources that are read in the `with` block. The error of a reader is raised in place
        of TensorFlow's, and an example that cannot be decoded is looked for.

    Raises:
      DataError: If reading or processing data fails in the `with` block, or a kernel refuses a
        value of the data.
    """
    try:
        yield
    except tf.errors.OpError as error:
        # It may have been set before the block: the data are read some batches ahead.
        for source in sources:
            if source.error is not None:
                raise _of_reader(source) from None
        text = str(error.message)
        if not isinstance(error, _KINDS_OF_DATA) or not _OF_DATA.search(text):
            raise
        # Not for an error of the model's kernels.
        decoded = sources if "terator" in text else ()
        for source in decoded:
            if (found := source.undecodable()) is not None:
                raise found from None
        reason = _NODE.split(text)[0].strip().splitlines()[-1].strip()
        reason = _unescaped(_BEFORE_REASON.sub("", reason))
        if beyond := _BEYOND_TABLE.search(text):
            value, rows, node = beyond.groups()
            reason += (
                f". The value {value} was looked up by {_layer(node)}, whose table has rows from 0 "
                f"to {int(rows) - 1}. Give the model a larger vocabulary or number of categories, "
                "or correct the data."
            )
        # A Python function of the data, such as a generator, leaves its traceback in the text.
        place = place_of(error) if "Traceback (most recent" in text else None
        note = f"\n{place.note}" if place else ""
        raise DataError(f"Reading or processing a batch failed: {reason}{note}") from None


def _of_reader(source: Any) -> Exception:
    """Returns the error that a reader raised, as it is to be raised again."""
    error: Exception = source.error
    source.error = None
    if isinstance(error, DataError) or not repeats(error):
        return error
    return DataError(
        f"{source.name} could not be read: {type(error).__name__}: {error}. Correct its data or "
        "its reader."
    )


def _unescaped(reason: str) -> str:
    """Returns the message of an assertion as it was written; others as they are."""
    asserted = _ASSERTED.match(reason)
    if asserted is None:
        return reason
    return re.sub(r"\\(['\"\\])", r"\1", asserted[1].replace("] [", ""))


def _layer(node: str) -> str:
    """Returns the name of a layer from that of a node: "while/replica_1/gpt_1/tokens/GatherV2"."""
    names = [name for name in node.split("/") if not re.match(r"while|replica_\d", name)]
    return "/".join(names[:-1]) or node
