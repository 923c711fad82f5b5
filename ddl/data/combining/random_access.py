"""Checks that sources can be combined: they need random access and equal features."""

from typing import Any

from ddl.data.conversion import as_source
from ddl.data.decoded import DecodedSource
from ddl.data.source import IndexedSource
from ddl.errors import DataError

RandomAccess = IndexedSource | DecodedSource


def with_random_access(data: Any, user: str) -> RandomAccess:
    """Returns the data as a source with random access.

    Args:
      data: A source, or what `ddl.data.as_source` converts into one.
      user: The function that asks, for the message.

    Raises:
      DataError: If the data are a stream or of a type that is not supported.
    """
    source = as_source(data)
    if not isinstance(source, RandomAccess):
        raise DataError(
            f"{user} needs data whose examples are found by their numbers, got "
            f"{type(source).__name__}. A tf.data.Dataset has its own methods for this: take, skip, "
            "concatenate and sample_from_datasets. Otherwise pass arrays or a source of files."
        )
    if not source.has_numbered_examples:
        kind = type(source).__name__
        raise DataError(
            f"{user} finds examples by their numbers, but those of a {kind} depend on the batch. "
            f"Apply {user} to the data within the {kind} instead."
        )
    return source


def check_same_spec(sources: list[RandomAccess], user: str) -> None:
    """Checks that all sources have the features of the first one, in shape and dtype.

    Raises:
      DataError: If there are no sources, or the features of one differ.
    """
    if not sources:
        raise DataError(
            f"{user} needs at least one data set, got an empty list. Pass the data sets to join, "
            "such as [first, second]."
        )
    expected = _described(sources[0])
    for number, source in enumerate(sources[1:], start=1):
        if (given := _described(source)) != expected:
            raise DataError(
                f"{user} needs the same features in all data sets. Number 0 has "
                f"{_text(expected)}; number {number} has {_text(given)}. Rename or convert "
                "features of one, so that they agree."
            )


def _described(source: RandomAccess) -> dict[str, str]:
    return {
        name: f"{spec.dtype.name} {spec.shape}"
        for name, spec in sorted(source.element_spec.items())
    }


def _text(described: dict[str, str]) -> str:
    return ", ".join(f"{name}: {spec}" for name, spec in described.items())
