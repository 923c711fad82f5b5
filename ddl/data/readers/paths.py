"""Paths of the files of a data set, from patterns."""

import collections
import fnmatch
import glob
import os
import re
from collections.abc import Sequence

from ddl.errors import DataError

_SHARD = re.compile(r"(.*)-(\d+)-of-(\d+)(.*)", re.DOTALL)

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""A path, a pattern such as "data/train-*", or a list of them."""


def found_files(files: Paths, name: str) -> list[str]:
    """Returns the paths of files; the matches of a pattern are sorted.

    Args:
      files: A path, a pattern of the module `glob`, or a list of them.
      name: Name of the argument for messages, such as "tf_records.files".

    Raises:
      DataError: If there is no such file, a file occurs twice, or a pattern matches shards such as
        "train-00000-of-00003" of which others, whose names it matches, are missing.
    """
    found: list[str] = []
    for one in [files] if isinstance(files, str | os.PathLike) else files:
        if not isinstance(one, str | os.PathLike):
            raise DataError(f"{name} must be a path or a list of paths, got {one!r:.60}.")
        path = os.fspath(one)
        matches = [path] if os.path.isfile(path) else sorted(glob.glob(path, recursive=True))
        matches = [match for match in matches if os.path.isfile(match)]
        if not matches:
            pattern = " It is a folder: add '/*'." if os.path.isdir(path) else ""
            raise DataError(
                f"{name} must name existing files of this machine, but none is at or matches "
                f"{path}; we are in {os.getcwd()}.{pattern}"
            )
        if path not in matches:
            _check_shards(path, matches, name)
        found += matches
    if not found:
        raise DataError(f"{name} must name at least one file, got an empty list.")
    ((place, times),) = collections.Counter(map(os.path.realpath, found)).most_common(1)
    if times > 1:
        raise DataError(f"{name} must name each file once, got {place} {times} times.")
    return found


def _check_shards(pattern: str, files: Sequence[str], name: str) -> None:
    """Refuses incomplete sets; a pattern may choose shards, as train-0000?-of-00128 does."""
    shards = [shard for shard in map(_SHARD.fullmatch, files) if shard]
    sets = {shard.group(1, 3, 4) for shard in shards}
    if len({(first, end) for first, _, end in sets}) < len(sets):
        totals = ", ".join(sorted({total for _, total, _ in sets}))
        raise DataError(
            f"{name} = {pattern!r} must match one set of shards, but it matches sets of {totals}. "
            "Remove the older files, or name one set."
        )
    for first, total, end in sets:
        begin = int(f"{first}-{total}-of-{total}{end}" in files)  # some programs count from 1
        numbers = range(begin, begin + int(total))
        width = min(len(shard[2]) for shard in shards)  # some programs do not pad
        whole = [f"{first}-{number:0{width}}-of-{total}{end}" for number in numbers]
        if lacking := sorted({*fnmatch.filter(whole, pattern)} - {*files}):
            raise DataError(
                f"{name} = {pattern!r} must match whole sets of shards, but {len(lacking):,} of "
                f"{total} are missing, such as {lacking[0]}. Copy them, or list the paths to read."
            )
