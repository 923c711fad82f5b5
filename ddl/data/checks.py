"""Checks of evaluation data against training data, and of values while a graph runs."""

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import tensorflow as tf
from absl import logging

from ddl.errors import DataError
from ddl.user_code import place_of


class _Read(Protocol):
    """Methods that a source may have for errors."""

    def damaged(self) -> str | None: ...


# Messages of tf.data.experimental.assert_cardinality.
_ENDED_EARLY = re.compile(r"expected to contain (\d+) elements but contained only (\d+) elements")
_ENDED = re.compile(r"expected to contain an infinite number of elements but contained only (\d+)")

# Texts of errors that the data cause: iterators name themselves, and kernels name the refused
# value. The nodes after the first are those that an error passes through, often an iterator's.
_OF_DATA = re.compile(
    r"with iterator: Iterator|\{\{node [^}]*Iterator|\[Op:Iterator|"
    r"Feature '|Received a label value|\bindices\S* = (\] \[)?[^] ]+(\] \[)? is not in \["
)

# A token or category that a layer looks up, and the node that does so. An assertion of a layer puts
# each piece of its message in brackets.
_BEYOND_TABLE = re.compile(
    r"\bindices\S* = (?:\] \[)?(-?\d+)(?:\] \[)? is not in \[0, (\d+)\)\]?\s*"
    r"\[\[\{\{node ([^}]*)\}\}"
)

# The scope of the nodes that read examples within a function of a worker.
READ_ON_WORKER = "read_on_worker"

# Failures of disks and networks, which a restart may not meet again: they are no fault of the data.
_OF_SYSTEM = re.compile(
    r"Input/output error|(Connection\w*|BrokenPipe|Timeout)Error\b|\[Errno (5|110|116)\]|"
    r"Temporary failure in name resolution"
)

# Nodes that an error of the data passes through, as do errors of other nodes.
_IN_BATCH = re.compile(rf"Iterator|{READ_ON_WORKER}")

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
    """Checks that the labels of sources that name their classes mean the same.

    Args:
      train: Source of the training data.
      evaluation: Source of the evaluation data.

    Raises:
      DataError: If the classes, or their order, differ.
    """
    ours, theirs = (getattr(source, "classes", None) for source in (train, evaluation))
    if ours is not None and theirs is not None and ours != theirs:
        raise DataError(
            f"The classes of the training data are {', '.join(ours)}, those of the evaluation "
            f"data {', '.join(theirs)}, so equal labels mean different classes. Pass the same "
            "list, such as ImageFolder.classes, to both."
        )


@tf.autograph.experimental.do_not_convert
def checked_finite(features: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    """Returns the features with checks for NaN, infinity and negative weights.

    Args:
      features: Tensors of any shape by name; only floating ones are checked.

    Raises:
      tf.errors.InvalidArgumentError: When the checks run, eagerly or in a graph, and fail.
    """
    finite = {
        name: tf.debugging.check_numerics(values, f"Feature {name!r} contains NaN or infinity")
        if values.dtype.is_floating
        else values
        for name, values in features.items()
    }
    return checked_weight(finite)


@tf.autograph.experimental.do_not_convert
def checked_weight(features: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    """Returns the features with a check that "weight", if present, is finite and ≥ 0.

    Args:
      features: Tensors by name; "weight" is floating, of any shape.

    Raises:
      tf.errors.InvalidArgumentError: When the check runs, eagerly or in a graph, and fails.
    """
    features = dict(features)
    if "weight" in features:
        weight = features["weight"]
        message = "Feature 'weight' contains a negative, NaN or infinite value"
        nan = tf.constant(float("nan"), weight.dtype)
        features["weight"] = tf.debugging.check_numerics(tf.where(weight < 0, nan, weight), message)
    return features


@contextlib.contextmanager
def data_errors(*sources: _Read) -> Iterator[None]:
    """Converts TensorFlow's errors about bad data into a short DataError.

    Other errors of TensorFlow pass through: of devices, compilers, collectives and tasks, and those
    of disks and networks, such as a ConnectionResetError of a function that looks up examples.

    Args:
      *sources: Sources that are read in the `with` block; their damaged examples are looked for,
        and named in the error.

    Raises:
      DataError: If reading or processing data fails in the `with` block, or a kernel refuses a
        value of the data.
    """
    try:
        yield
    except (
        tf.errors.InvalidArgumentError,
        tf.errors.UnknownError,
        tf.errors.DataLossError,
        tf.errors.NotFoundError,
        tf.errors.OutOfRangeError,
    ) as error:
        # The reason follows the graph's stack trace and precedes the node name. If the graph called
        # a Python function that raised a DataError, the message of that error is the reason.
        text = str(error.message)
        own = re.findall(r"ddl\.errors\.DataError: (.*)", text)
        raised = text.split("Traceback (most recent")[0]
        if isinstance(error, tf.errors.UnknownError) and not own and _OF_SYSTEM.search(raised):
            raise
        damaged = (
            [source.damaged() for source in sources] if _IN_BATCH.search(text) and not own else []
        )
        if not own and not any(damaged) and not _OF_DATA.search(text):
            raise
        reason = own[-1] if own else _NODE.split(text)[0].strip().splitlines()[-1].strip()
        reason = _unescaped(_BEFORE_REASON.sub("", reason))
        if beyond := _BEYOND_TABLE.search(text):
            value, rows, node = beyond.groups()
            reason += (
                f". The value {value} was looked up by {_layer(node)}, whose table has rows from 0 "
                f"to {int(rows) - 1}. Give the model a larger vocabulary or number of categories, "
                "or correct the data."
            )
        # A Python function of the data, such as a generator, leaves its traceback in the text.
        place = None if own or "Traceback (most recent" not in text else place_of(error)
        note = f"\n{place.note}" if place else ""
        note = "".join(f"\n{each}" for each in damaged if each) + note
        raise DataError(f"Reading or processing a batch failed: {reason}{note}") from None
    except tf.errors.FailedPreconditionError as error:
        if endless := _ENDED.search(str(error.message)):
            raise DataError(
                f"Data that are read without end must not end, but ended after "
                f"{int(endless[1]):,} examples. If a function with the argument start makes the "
                "data set, repeat it there by dataset.repeat(); else correct what it reads, since "
                "it has no examples."
            ) from None
        ended = _ENDED_EARLY.search(str(error.message))
        if ended is None:
            raise
        wanted, found = (int(number) for number in ended.groups())
        raise DataError(
            f"The data set must have {wanted:,} examples, got only {found:,}. Set num_examples to "
            f"{found}, or correct what the data set reads."
        ) from None


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
