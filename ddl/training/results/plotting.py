"""Plots of a history, with matplotlib."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ddl.errors import ConfigError, did_you_mean, installing

_Splits = Mapping[str, Mapping[str, np.ndarray]]


def plot(splits: _Splits, names: Sequence[str]) -> list[Any]:
    """Plots figures over the steps; see `History.plot`.

    Args:
      splits: The figures of each split, with "step" and "epoch".
      names: Names of figures; none plots those of the evaluations, or else of training.
    """
    known = dict.fromkeys(
        name
        for split in (splits["eval"], splits["train"])
        for name in split
        if name not in ("step", "epoch") and len(split["step"])
    )
    if not known:
        raise ConfigError("The history is empty. Train first.")
    for name in names:
        if name not in known:
            raise ConfigError(
                f"The history has no figure {name!r}, only {', '.join(known)}."
                f"{did_you_mean(name, set(known))}"
            )
    if not names:
        evaluated = splits["eval"]
        names = [name for name in known if name in evaluated or not len(evaluated["step"])]
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ConfigError(
            f"plot needs matplotlib, which cannot be imported ({error}). " + installing("plots")
        ) from error
    _, axes = pyplot.subplots(
        1, len(names), figsize=(4.5 * len(names), 3.2), squeeze=False, layout="constrained"
    )
    for one, name in zip(axes[0], names, strict=True):
        for split, figures in splits.items():
            values = figures.get(name, np.array([]))
            given = np.isfinite(values)
            if given.any():
                # A single point has no line.
                one.plot(figures["step"][given], values[given], marker=".", label=split)
        one.set_xlabel("step")
        one.set_title(name.replace("_", " "))
        one.legend()
    return list(axes[0])
