"""Warm start: initial weights from another model's checkpoint."""

import dataclasses
import os
import re
from collections.abc import Iterable
from typing import Any

import keras

from ddl.checkpoints.contents import SEED_STATE, paths_of, some
from ddl.checkpoints.directory import CheckpointDirectory, SavedCheckpoint, file_errors, reading
from ddl.errors import ConfigError
from ddl.optimizers.weight_average import AVERAGE_PREFIX, WeightAverages

_PART = re.compile(r"(?<![^/])([^/]+?)(?:_(\d+))?(?![^/])")
"""A part of a path, and its number."""


@dataclasses.dataclass(frozen=True)
class WarmStart:
    """The choice of weights to read from another model's checkpoint, and of their names there.

    A weight's name is its path in the model, such as `conv_1/kernel`, without the model's own
    name. Keras numbers layers without a name through a process; if that lets more weights match,
    and without `rename`, each kind is numbered anew. `--dry_run` prints the matches. A weight and
    its source must have the same shape.

    Attributes:
      checkpoint: A model directory or a folder of checkpoints of ddl, whose newest readable
        checkpoint is read, or the path of a checkpoint without the file endings.
      include: Regular expression matched at the start of each weight's name in this model; only
        matching weights are read. A plain prefix such as `encoder/` works. The empty string
        matches all weights.
      rename: Pattern and replacement for `re.sub`, which turn a weight's name in this model into
        its name in the checkpoint; None keeps the names.
      averaged: Whether to read the weight averages; the other run must have kept them.

    Raises:
      ConfigError: If `rename` is not a pair, or an expression is invalid.
    """

    checkpoint: str
    include: str = ""
    rename: tuple[str, str] | None = None
    averaged: bool = False

    def __post_init__(self) -> None:
        try:
            re.sub(self.include, "", "")
            re.sub(*(self.rename or ("", "")), "")
        except (re.error, TypeError) as error:
            raise ConfigError(
                "WarmStart.include must be a regular expression and WarmStart.rename a pair "
                f"(expression, replacement), got {self.include!r} and {self.rename!r}: {error}."
            ) from error

    def find(self) -> SavedCheckpoint:
        """Returns the checkpoint to read. Raises errors as `apply` does."""
        path = self.checkpoint
        for folder in (path, os.path.join(path, "checkpoints")):
            if (newest := CheckpointDirectory(folder).newest()) is not None:
                return newest
        there, step = CheckpointDirectory(os.path.dirname(path)), f"/{path}".rpartition("/step-")[2]
        if step.isdigit() and not there.damage_of(saved := there.at(int(step))):
            return saved
        raise ConfigError(
            "WarmStart.checkpoint must be a model directory, a folder of checkpoints, or the path "
            f"of a readable checkpoint, such as runs/a/checkpoints/step-100, got {path!r}."
        )

    def apply(self, model: keras.Model, averages: WeightAverages | None = None) -> str:
        """Assigns the matching weights to the model. Eager, cross-replica context.

        Args:
          model: A built model.
          averages: The trainer's weight averages, if it keeps any; reset to the new weights.

        Returns:
          A report of three lines, with names of the weights that were read, kept and
          unused.

        Raises:
          ConfigError: If there is no readable checkpoint, no weight matches, a name belongs to two
            weights, or a shape differs. The model is then unchanged.
          ModelDirectoryError: If all checkpoints of a folder are damaged, or one cannot be read.
        """
        named = [(v.path, v) for v in model.weights] if self.averaged else paths_of(model)
        saved, here = self.find(), _by_name(named)
        part, digest = "averages/" if self.averaged else "model/", saved.metadata.sha256[:8]
        entries = {k: e for k, e in saved.metadata.values.items() if k.startswith(part)}
        there = _by_name((e[0].removeprefix(AVERAGE_PREFIX), k) for k, e in entries.items())
        matching = [name for name in here if re.match(self.include, name)]
        sources = {n: re.sub(*self.rename, n) if self.rename else n for n in matching}
        read = {name: source for name, source in sources.items() if source in there}
        anew, found = _numbered_anew(here), _numbered_anew(there)
        alike = {n: found[key] for key, n in anew.items() if n in sources and key in found}
        read = alike if not self.rename and len(alike) > len(read) else read
        if not read:
            raise ConfigError(
                f"{self}: at least one weight of {saved} ({some(list(there)) or 'none'}) must "
                f"match one of the model ({some(list(here))}). Correct include or rename."
            )
        for name, source in read.items():
            if len(here[name]) + len(there[source]) > 2:
                raise ConfigError(
                    f"WarmStart: {name} of this model and {source} in {saved} must name one weight "
                    "each, got several. Rename layers, or exclude these by WarmStart.include."
                )
            ours, theirs = tuple(here[name][0].shape), tuple(entries[there[source][0]][1])
            if ours != theirs:
                raise ConfigError(
                    f"WarmStart: {source} in {saved} must have the shape of {name} in this model, "
                    f"{ours}, got {theirs}. Exclude it by WarmStart.include, such as '(?!logits)'."
                )
        with file_errors(str(saved)), reading(saved.prefix) as reader:
            for name, source in read.items():
                here[name][0].assign(reader.get_tensor(there[source][0]))
        if averages is not None:
            averages.reset()
        names = [n if n == source else f"{n} ← {source}" for n, source in read.items()]
        kept = [name for name in here if name not in read]
        unused = [name for name in there if name not in read.values()]
        return (
            f"Warm start from {saved}, digest {digest}. Read {len(read)} weights: {some(names)}.\n"
            f"  Kept at their initial values: {some(kept) or 'none'}.\n"
            f"  In the checkpoint, but not read: {some(unused) or 'none'}."
        )


def _numbered_anew(names: Iterable[str]) -> dict[str, str]:
    """Returns names by those of a process that makes no other layers first."""
    parts = [(kind, int(number or 0)) for name in names for kind, number in _PART.findall(name)]
    lowest = dict(sorted(parts, reverse=True))  # the smallest number of a kind comes last
    return {_PART.sub(lambda x: f"{x[1]}_{int(x[2] or 0) - lowest[x[1]]}", n): n for n in names}


def _by_name(named: Iterable[tuple[str, Any]]) -> dict[str, list[Any]]:
    """Returns items by name, without the model's own name, if all names begin with one."""
    found: dict[str, list[Any]] = {}
    for name, item in named:
        if not name.endswith(SEED_STATE):
            found.setdefault(name, []).append(item)
    is_in_model = all(name.count("/") > 1 for name in found)
    if is_in_model and len({name.partition("/")[0] for name in found}) == 1:
        return {name.partition("/")[2]: items for name, items in found.items()}
    return found
