"""Checks of evaluation data against training data, and errors of data that are being read."""

import contextlib
import re
from collections.abc import Collection, Iterator
from typing import Any

import tensorflow as tf
from absl import logging

from ddl.data.source import Source
from ddl.errors import DataError, place_of, repeats

# Texts of errors that the data cause: iterators name themselves, and kernels name the refused
# value.
_OF_DATA = re.compile(
    r"with iterator: Iterator|\[\[[^]]*Iterator|\[Op:Iterator|"
    r"MultiDeviceIteratorGetNextFromShard|Feature '|"
    r"Received a label value|\bindices\S* = (\] \[)?[^] ]+(\] \[)? is not in \["
)

# tf.errors.UNKNOWN, INVALID_ARGUMENT, NOT_FOUND, FAILED_PRECONDITION, OUT_OF_RANGE, INTERNAL and
# DATA_LOSS.
_CODES_OF_DATA = (2, 3, 5, 9, 11, 13, 15)

# A node with an error, which may lie in a function that a function of the data calls.
_NODE = re.compile(r"\[\[\{\{(?:function_node [^}]*\}\}\{\{)?node")

_BEFORE_REASON = re.compile(
    r"^(\(\d+\) [A-Z_]+: *)?(\{\{function_node [^}]*\}\} *)?"
    r"(Error in user-defined function passed to .* with iterator: \S+: *)?"
)


def check_same_features(
    train: dict[str, tf.TensorSpec], evaluation: dict[str, tf.TensorSpec]
) -> None:
    """Checks that other data have the features of the training data, in the same shapes.

    Logs a warning if a feature is an integer in one and a float in the other.

    Args:
      train: `element_spec` of the training data.
      evaluation: `element_spec` of the other data, which may have further features.

    Raises:
      DataError: If a feature is missing or has another shape.
    """
    for name, spec in train.items():
        if name not in evaluation:
            raise DataError(f"Evaluation data lack the feature {name!r} of the training data.")
        if evaluation[name].shape != spec.shape:
            raise DataError(
                f"Feature {name!r} must have shape {spec.shape}, as in the training data, got "
                f"{evaluation[name].shape}. Reshape or resize it; a batch of one is x[np.newaxis]."
            )
        one, other = spec.dtype, evaluation[name].dtype
        # No error, since the values may have the same scale all the same.
        if (one.is_integer and other.is_floating) or (one.is_floating and other.is_integer):
            logging.warning(
                f"Feature {name!r} is {one.name} in the training data, but {other.name} in other "
                "data, so its values may have another scale. Convert both alike, with .astype."
            )


def check_same_classes(one: Any, other: Any) -> None:
    """Checks that the labels of sources whose items name their classes mean the same.

    Args:
      one: A source or stream, such as of the training data.
      other: Another, such as of the evaluation data.

    Raises:
      DataError: If the classes, or their order, differ.
    """
    of_both = (getattr(getattr(s, "items", None), "class_names", None) for s in (one, other))
    classes = [", ".join(map(str, names)) for names in of_both if isinstance(names, Collection)]
    if len({*classes}) > 1:
        raise DataError(
            f"All data must have the same classes, got {classes[0]}, and {classes[1]}. Give them "
            "the same class folders."
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
            if (own := source.error) is not None:
                source.error = None
                if isinstance(own, DataError) or not repeats(own):
                    raise own from own.__cause__
                known = f"{source.name} could not be read: {type(own).__name__}: {own}. Correct it."
                raise DataError(known) from None
        text = str(error.message)
        if error.error_code not in _CODES_OF_DATA or not _OF_DATA.search(text):
            raise
        # Not for an error of the model's kernels.
        for source in sources if "terator" in text else ():
            if isinstance(source, Source) and (found := source.undecodable()):
                raise found from None
        reason = _NODE.split(text)[0].strip().splitlines()[-1].strip()
        reason = _BEFORE_REASON.sub("", reason)
        # A Python function of the data, such as a generator, leaves its traceback in the text.
        place = place_of(error) if "Traceback (most recent" in text else None
        note = f"\n{place.note}" if place else ""
        raise DataError(f"Reading or processing a batch failed: {reason}{note}") from None
