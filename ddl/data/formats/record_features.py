"""Files of records of `tf.train.Example`, described by names, dtypes and shapes."""

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from ddl.data.formats.image_folder import decoded_image
from ddl.data.records import RecordSource
from ddl.data.storage.file_sets import matches
from ddl.errors import ConfigError, DataError, either

_STORED = {"float32": tf.float32, "int64": tf.int64, "string": tf.string}
_RAW = ("uint8", "uint16", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
_FORM = (
    "(key, dtype, shape), where dtype is float32, int64 or string, or image for a JPEG, PNG or BMP "
    "file, or the numpy dtype of raw bytes, such as raw uint8"
)


def record_files(
    files: str | Sequence[str],
    features: Mapping[str, tuple[str, str, Sequence[int]]],
    *,
    num_examples: int | None = None,
) -> RecordSource:
    """Builds a source of TFRecord or ArrayRecord files of `tf.train.Example`.

    Args:
      files: A pattern, such as "data/train-*", whose matches are sorted; or a list of paths. Names
        that end with `.array_record` are ArrayRecord files, all others TFRecord files, which must
        not be compressed. If a pattern matches shards such as `train-00000-of-00003`, all shards
        that it can match must be there; to read some of them, list their paths.
      features: For each feature of an example (key, dtype, shape): the key in `tf.train.Example`;
        "float32", "int64" or "string" for a list of such values, "image" for an encoded image,
        which becomes uint8 [height, width, channels], or "raw uint8" and the like for the bytes of
        an array; and the static shape. For example
        {"image": ("image/encoded", "image", (32, 32, 3)), "label": ("image/class", "int64", ())}.
      num_examples: Number of examples to use, from the first on. None uses all.

    Raises:
      ConfigError: If a feature has another form.
      DataError: If no file matches, a shard is missing, the first record lacks a feature, or
        `RecordSource` cannot read the files.
    """
    if isinstance(files, str):
        found = matches(files, "record_files.files")
        if not found:
            raise DataError(
                f"No file matches record_files.files = {files!r}. Pass a pattern or a list of "
                "paths of TFRecord or ArrayRecord files."
            )
        files = found
    if not features:
        raise ConfigError(f"record_files.features must name at least one feature as {_FORM}.")
    described = {name: _checked(name, feature) for name, feature in features.items()}
    parsed = {
        key: tf.io.FixedLenFeature(shape if dtype in _STORED else [], _STORED.get(dtype, tf.string))
        for key, dtype, shape in described.values()
    }

    def decode(record: tf.Tensor, seed: tf.Tensor) -> dict[str, tf.Tensor]:
        values = tf.io.parse_single_example(record, parsed)
        return {
            name: _converted(values[key], name, dtype, shape)
            for name, (key, dtype, shape) in described.items()
        }

    source = RecordSource(files, decode, num_examples)
    try:
        source.example(tf.constant(0, tf.int64), tf.zeros([2], tf.int64))
    except (tf.errors.InvalidArgumentError, tf.errors.DataLossError) as error:
        raise DataError(
            f"The first record of {files[0]} does not hold the features of record_files.features: "
            f"{error.message.splitlines()[0]}. It must be a tf.train.Example with "
            f"{', '.join(f'{key!r} ({dtype})' for key, dtype, _ in described.values())}."
        ) from error
    return source


def _checked(name: str, feature: Any) -> tuple[str, str, tuple[int, ...]]:
    try:
        key, dtype, shape = feature
        shape = tuple(int(size) for size in shape)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"Feature {name!r} of record_files.features must be {_FORM}, got {feature!r}."
        ) from error
    kind, _, of_bytes = dtype.partition(" ")
    known = dtype in (*_STORED, "image") or (kind == "raw" and of_bytes in _RAW)
    if not known:
        raise ConfigError(
            f"The dtype of feature {name!r} of record_files.features must be "
            f"{either([*_STORED, 'image'])}, or raw with a dtype such as raw uint8, got {dtype!r}."
        )
    if dtype == "image" and (len(shape) != 3 or shape[2] not in (1, 3, 4)):
        raise ConfigError(
            f"The image feature {name!r} of record_files.features must have the shape (height, "
            f"width, channels) with 1, 3 or 4 channels, got {shape}."
        )
    return key, dtype, shape


def _converted(value: tf.Tensor, name: str, dtype: str, shape: tuple[int, ...]) -> tf.Tensor:
    if dtype in _STORED:
        return value
    if dtype == "image":
        remedy = "Set the feature's shape to this size, or write images of one size."
        return decoded_image(value, shape, tf.constant(f"of feature {name!r}"), remedy)
    return tf.reshape(tf.io.decode_raw(value, tf.as_dtype(dtype.partition(" ")[2])), shape)
