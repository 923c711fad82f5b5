"""Checks of the files of a data set: each once, and all shards of a set.

Shards have names such as `train-00000-of-00003.tfrecord`.
"""

import fnmatch
import os
import re
from collections import defaultdict
from collections.abc import Sequence

import tensorflow as tf

from ddl.errors import DataError

_SHARD = re.compile(r"(.*)-(\d+)-of-(\d+)((?:\..*)?)", re.DOTALL)


def paths_of(files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> list[str]:
    """Returns a path, or a list of paths, as a list of texts."""
    return [os.fspath(f) for f in ([files] if isinstance(files, str | os.PathLike) else files)]


def check_files(files: Sequence[str], name: str) -> None:
    """Checks that no file is listed twice.

    Args:
      files: Paths.
      name: Name of the argument for the message, such as `table.files`.

    Raises:
      DataError: If one is; names it.
    """
    seen: dict[str, str] = {}
    for file in files:
        place = os.path.realpath(file) if os.path.exists(file) else file
        if place in seen:
            also = "" if seen[place] == file else f" as {seen[place]} and"
            raise DataError(
                f"{name} must list each file once, got{also} {file}{'' if also else ' twice'}. "
                "Remove one of the two. To use its examples twice, pass two sources to "
                "ddl.data.concatenation."
            )
        seen[place] = file


def matches(pattern: str, name: str) -> list[str]:
    """Returns the files that a pattern matches, sorted, after checking that no shard is missing.

    Args:
      pattern: A pattern that tf.io.gfile.glob reads.
      name: Name of the argument for the message, such as `record_files.files`.

    Raises:
      DataError: If files are shards of a set, and the pattern matches the name of one that is
        missing, or matches two sets of the same name.
    """
    files = sorted(tf.io.gfile.glob(pattern))
    if problem := incomplete(files, pattern):
        raise DataError(
            f"{name} = {pattern!r} must match complete sets of shards, but {problem}. Copy or "
            "write the files again, or list the paths of those that you mean."
        )
    return files


def incomplete(files: Sequence[str], pattern: str) -> str | None:
    """Returns what is wrong with the files that a pattern matches; None: the sets are complete."""
    totals: dict[tuple[str, str], dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for file in files:
        if found := _SHARD.fullmatch(file):
            first, number, total, ending = found.groups()
            totals[first, ending][total].add(int(number))
    for (first, ending), of_name in totals.items():
        if len(of_name) > 1:
            one, other = sorted(of_name)[:2]
            return (
                f"it matches two sets, {first}-*-of-{one}{ending} and {first}-*-of-{other}{ending}"
            )
        for total, numbers in of_name.items():
            # Some programs count from 1.
            begin = 1 if int(total) in numbers and 0 not in numbers else 0
            named = (
                f"{first}-{number:0{len(total)}}-of-{total}{ending}"
                for number in range(begin, begin + int(total))
                if number not in numbers
            )
            # A pattern may choose some of the shards, as train-0000?-of-00128 does.
            of_names = os.path.basename(pattern)
            missing = [
                file for file in named if fnmatch.fnmatchcase(os.path.basename(file), of_names)
            ]
            if missing:
                return f"{len(missing):,} of {int(total):,} shards are missing, first {missing[0]}"
    return None
