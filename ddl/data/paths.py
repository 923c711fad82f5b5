"""Paths of the files of a data set: each is there, and is listed once."""

import os
from collections.abc import Sequence
from typing import TypeAlias

from ddl.errors import DataError

Paths: TypeAlias = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""The path of a file, or a list of paths."""


def checked_paths(files: Paths, argument: str) -> list[str]:
    """Returns a path, or a list of paths, as a list of texts after checking them.

    Args:
      files: The path or paths.
      argument: What messages call them, such as "table.files".

    Raises:
      DataError: If there are none, a file is missing, or one is listed twice, by a link too.
    """
    paths = [os.fspath(f) for f in ([files] if isinstance(files, str | os.PathLike) else files)]
    if not paths:
        raise DataError(f"{argument} is empty. Pass at least one path.")
    seen: dict[str, str] = {}
    for path in paths:
        if not os.path.isfile(path):
            raise DataError(
                f"{argument} names {path!r}, which is no file ({os.path.abspath(path)}). Put the "
                "file there, or correct the path."
            )
        place = os.path.realpath(path)
        if place in seen:
            raise DataError(
                f"{argument} must list each file once, got {path!r} and {seen[place]!r}. Remove "
                "one; to use its examples twice, pass two sources to ddl.data.concatenate."
            )
        seen[place] = path
    return paths
