"""Data sets of Hugging Face `datasets` and TensorFlow Datasets, by path or name."""

import os
from collections.abc import Mapping
from typing import Any

from ddl.data.objects.items import from_items
from ddl.data.random_access import RandomAccessSource
from ddl.errors import DataError, did_you_mean, installing


def hugging_face(
    data: Any, *, split: str | None = None, features: Mapping[str, str] | None = None
) -> RandomAccessSource:
    """Builds a source of a data set of Hugging Face `datasets` (the extra `huggingface`).

    Args:
      data: A folder that `save_to_disk` wrote, whose Arrow files are memory-mapped; or a `Dataset`
        or `DatasetDict` in memory.
      split: Name of the part of a `DatasetDict`, such as "train".
      features: Columns by the name of the feature, such as {"image": "img", "label": "label"}. None
        takes all columns. Columns must have the same shape in all rows.

    Raises:
      DataError: If the package or the folder is missing, a split or a column does not exist, or the
        rows are not of one shape.
    """
    datasets = _imported("datasets", "huggingface")
    if isinstance(data, str | os.PathLike):
        path = os.fspath(data)
        try:
            data = datasets.load_from_disk(path)
        except (OSError, ValueError) as error:
            raise DataError(
                f"{path!r} could not be read as a data set of Hugging Face: {error}. Write it with "
                f"dataset.save_to_disk({path!r}), where the network can be reached."
            ) from error
    if isinstance(data, datasets.DatasetDict):
        if split not in data:
            raise DataError(
                f"The data set has the splits {', '.join(data)}. Set hugging_face.split to one of "
                f"them, got {split!r}."
            )
        data = data[split]
    elif split is not None:
        raise DataError(f"The data set has no splits. Remove hugging_face.split = {split!r}.")
    if not isinstance(data, datasets.Dataset):
        raise DataError(
            f"hugging_face.data must be a Dataset or a folder, got {type(data).__name__}. For an "
            "IterableDataset, use ddl.data.endless."
        )
    columns = dict(features or {name: name for name in data.column_names})
    _check_known(columns.values(), data.column_names, "hugging_face.features")
    chosen = data.select_columns([*dict.fromkeys(columns.values())]).with_format("numpy")
    return from_items(
        chosen, lambda row: {feature: row[column] for feature, column in columns.items()}
    )


def tfds(
    name: str,
    *,
    split: str,
    features: Mapping[str, str] | None = None,
    data_dir: str | None = None,
) -> RandomAccessSource:
    """Builds a source of TensorFlow Datasets by name, with random access (the extra `tfds`).

    The data set must have been prepared in the format of random access; nothing is downloaded:
    `tfds.builder(name, file_format="array_record").download_and_prepare()`.

    Args:
      name: Name of the data set, such as "mnist" or "mnist:3.0.1".
      split: Part of the data set, such as "train" or "train[:80%]".
      features: Keys of its examples by the name of the feature; None takes all.
      data_dir: Folder of the prepared data sets; None takes the package's default.

    Raises:
      DataError: If a package, the data set, the split or a feature is missing.
    """
    package = _imported("tensorflow_datasets", "tfds")
    try:
        builder = package.builder(name, data_dir=data_dir)
    except (package.core.registered.DatasetNotFoundError, ValueError) as error:
        raise DataError(f"TensorFlow Datasets has no data set {name!r}: {error}") from error
    missing = not os.path.exists(os.path.join(builder.data_path, "dataset_info.json"))
    if missing:
        raise DataError(
            f"The data set {name!r} was not found at {builder.data_path}. Prepare it, where the "
            f"network can be reached: tfds.builder({name!r}, data_dir={data_dir!r}, "
            "file_format='array_record').download_and_prepare()."
        )
    try:
        data = builder.as_data_source(split=split)
    except (NotImplementedError, ImportError, ValueError, KeyError) as error:
        raise DataError(
            f"The data set {name!r} at {builder.data_path} cannot be read with random access: "
            f"{error} Prepare it with file_format='array_record', and correct tfds.split."
        ) from error
    known = list(builder.info.features)
    columns = dict(features or {key: key for key in known})
    _check_known(columns.values(), known, "tfds.features")
    return from_items(data, lambda item: {one: item[key] for one, key in columns.items()})


def _imported(package: str, extra: str) -> Any:
    try:
        return __import__(package)
    except ImportError as error:
        raise DataError(
            f"This needs the package {package}, which could not be imported: {error}. "
            + installing(extra)
        ) from error


def _check_known(wanted: Any, known: list[str], user: str) -> None:
    for name in wanted:
        if name not in known:
            raise DataError(
                f"{user} names {name!r}, but the data set has {', '.join(known)}."
                f"{did_you_mean(name, known)}"
            )
