"""The comparison of two settings, and its result in words."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

from ddl.compare.intervals import LEVEL, Interval, paired, sign_flip, unpaired
from ddl.compare.runs import Setting, differing
from ddl.errors import ConfigError
from ddl.figures import Direction

_LEAST_FOR_SIGNS = 6  # with fewer differences, no sign-flip p-value is below 5%


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The difference B − A of a metric over seeds.

    Attributes:
      seeds: The seeds of the pairs; empty if the settings have no seed in common.
      a: The metric of A: for each of `seeds`, or for all seeds of A.
      b: The metric of B: for each of `seeds`, or for all seeds of B.
      interval: The difference of the means with its interval.
      p: p-value of the sign-flip test; None if the values are not paired.
      left_out: Seeds that only one of the settings has, if others are paired.
    """

    seeds: tuple[int, ...]
    a: tuple[float, ...]
    b: tuple[float, ...]
    interval: Interval
    p: float | None
    left_out: tuple[int, ...] = ()

    @property
    def verdict(self) -> Literal["different", "equal", "unclear"]:
        """Whether the settings are called different.

        They are if the interval excludes 0 and, where enough seeds are paired for a sign-flip test
        at this level, that test agrees. `equal` means that every pair has the same value.
        """
        if self.p is not None and self.a == self.b:
            return "equal"
        signs_count = self.p is not None and len(self.seeds) >= _LEAST_FOR_SIGNS
        agrees = not signs_count or (self.p is not None and self.p <= 1 - LEVEL + 1e-12)
        return "different" if self.interval.excludes_zero and agrees else "unclear"


def compare(a: dict[int, float], b: dict[int, float]) -> Comparison:
    """Compares a metric of two settings: paired by seed, or unpaired if no seed is common.

    Args:
      a: The metric of A by seed.
      b: The metric of B by seed.

    Raises:
      ConfigError: If a setting has fewer than two seeds, or exactly one seed is common.
    """
    for name, values in (("A", a), ("B", b)):
        if len(values) < 2:
            raise ConfigError(f"{name} must have at least two seeds, got {len(values)}. Add runs.")
    common = tuple(seed for seed in sorted(a) if seed in b)
    if not common:
        first, second = tuple(a.values()), tuple(b.values())
        return Comparison((), first, second, unpaired(first, second), None)
    if len(common) == 1:
        raise ConfigError(
            f"A and B must have at least two seeds in common, or none, got SEED = {common[0]} "
            "alone. Train both with the same seeds."
        )
    first, second = (tuple(values[seed] for seed in common) for values in (a, b))
    differences = [y - x for x, y in zip(first, second, strict=True)]
    left_out = tuple(sorted({*a, *b} - set(common)))
    return Comparison(common, first, second, paired(differences), sign_flip(differences), left_out)


def lines(
    found: Comparison, a: Setting, b: Setting, metric: str, split: str, direction: Direction
) -> list[str]:
    """Returns the lines to print: the settings, the values by seed, the interval, and the verdict.

    Args:
      found: The comparison.
      a: Setting A.
      b: Setting B.
      metric: Name of the metric.
      split: Split of the metric.
      direction: Whether the largest or the smallest value is best.
    """
    names = differing(a, b)
    text = [
        f"{one.name}: {_described(one, names)} ({len(one.runs)} seeds, "
        f"{next(iter(one.runs.values())).path.parent})"
        for one in (a, b)
    ]
    larger = "larger" if direction == "max" else "smaller"
    text += ["", f"{metric} ({split}; {larger} is better)", *_table(found, a, b), ""]
    if found.left_out:
        seeds = ", ".join(map(str, found.left_out))
        text.append(f"Seeds of one setting alone are left out: {seeds}.")
    return [*text, *_result(found), verdict(found, direction)]


def verdict(found: Comparison, direction: Direction) -> str:
    """Returns in words how sure the comparison is.

    Args:
      found: The comparison.
      direction: Whether the largest or the smallest value is best.
    """
    one, percent = found.interval, f"{LEVEL:.0%}"
    better = "B is better than A" if (one.mean > 0) == (direction == "max") else "B is worse than A"
    if found.verdict == "equal":
        return "The metric is equal for every seed: it shows no difference at all."
    if not one.spread:
        what = "all differences are" if found.seeds else "all values of each setting are"
        return (
            f"Not sure: {what} the same, so their spread, and with it the interval, is unknown. "
            "Add seeds."
        )
    if found.verdict == "different":
        fewer = ""
        if found.p is not None and len(found.seeds) < _LEAST_FOR_SIGNS:
            fewer = (
                f" It assumes normal differences: with fewer than {_LEAST_FOR_SIGNS} seeds, the "
                "sign-flip test cannot confirm it."
            )
        return (
            f"{better}: the {percent} interval excludes 0. At most about "
            f"{1 - LEVEL:.0%} of comparisons of equal settings show this.{fewer}"
        )
    if one.excludes_zero:
        return (
            f"Not sure: the {percent} interval excludes 0, but it assumes normal differences, and "
            f"the sign-flip test, which does not, has p = {found.p:.2g}. Add seeds."
        )
    return (
        f"Not sure that they differ: the {percent} interval contains 0. A difference between "
        f"{_signed(one.low)} and {_signed(one.high)} is compatible with these runs. More seeds "
        "narrow the interval."
    )


def _described(one: Setting, names: Sequence[str]) -> str:
    if not names:
        return "the same config"
    return ", ".join(f"{name} = {one.bindings.get(name, 'not bound')}" for name in names)


def _table(found: Comparison, a: Setting, b: Setting) -> list[str]:
    if found.seeds:
        rows = [
            (f"{seed}", f"{x:.6g}", f"{y:.6g}", _signed(y - x))
            for seed, x, y in zip(found.seeds, found.a, found.b, strict=True)
        ]
        rows = [("seed", "A", "B", "B − A"), *rows]
    else:
        pairs = [(one, seed, run.value) for one in (a, b) for seed, run in one.runs.items()]
        rows = [("seed", "A", "B", "")]
        for one, seed, value in pairs:
            shown = f"{value:.6g}"
            rows.append((f"{seed}", *((shown, "") if one is a else ("", shown)), ""))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _result(found: Comparison) -> list[str]:
    one = found.interval
    what = f"paired by {len(found.seeds)} seeds" if found.seeds else "unpaired: no seed is common"
    ends = f"{LEVEL:.0%} interval {_signed(one.low)} to {_signed(one.high)}" if one.spread else ""
    signs = "" if found.p is None else f"sign-flip test p = {found.p:.2g}"
    method = f"{'paired' if found.seeds else 'Welch'} t, {one.degrees} degrees of freedom"
    parts = [f"B − A = {_signed(one.mean)}", ends and f"{ends} ({method})", signs, what]
    return ["; ".join(filter(None, parts)) + "."]


def _signed(value: float) -> str:
    return "0" if value == 0 else f"{value:+.4g}"
