"""Confidence intervals and tests for the difference of two settings."""

import dataclasses
import functools
import math
from collections.abc import Sequence

import numpy as np

LEVEL = 0.95
"""Confidence of an interval: of intervals of equal settings, 5% exclude 0."""

_MOST_FLIPPED = 20  # differences for which all 2^n signs are tried
_RANDOM_FLIPS = 100_000


@dataclasses.dataclass(frozen=True)
class Interval:
    """A difference with its confidence interval.

    Attributes:
      mean: Mean difference.
      low: Lower end of the interval.
      high: Upper end of the interval.
      degrees: Degrees of freedom of Student's t.
      spread: Whether the values vary: without a spread the interval has no width and means nothing.
    """

    mean: float
    low: float
    high: float
    degrees: int
    spread: bool

    @property
    def excludes_zero(self) -> bool:
        """Whether 0 is outside of an interval that means something."""
        return self.spread and not self.low <= 0 <= self.high


def paired(differences: Sequence[float]) -> Interval:
    """Returns the paired t interval of a mean difference.

    The interval is mean ± t·s/√n with the quantile of Student's t with n - 1 degrees of freedom
    (Student, "The Probable Error of a Mean", Biometrika 1908). It assumes that the differences are
    about normal and independent; `sign_flip` does not assume the first.

    Args:
      differences: For each seed, the metric of B less that of A; at least two.

    Raises:
      ValueError: If there are fewer than two.
    """
    values = np.asarray(differences, float)
    _check_number(values)
    error = values.std(ddof=1) / math.sqrt(len(values))
    return _interval(float(values.mean()), float(error), len(values) - 1, values)


def unpaired(a: Sequence[float], b: Sequence[float]) -> Interval:
    """Returns Welch's t interval of the difference of two means.

    The two settings may have different variances (Welch, "The Generalization of 'Student's' Problem
    when Several Different Population Variances are Involved", Biometrika 1947). The degrees of
    freedom are rounded down, which widens the interval slightly.

    Args:
      a: The metric of A for each of its seeds; at least two.
      b: The metric of B for each of its seeds; at least two.

    Raises:
      ValueError: If one has fewer than two values.
    """
    first, second = np.asarray(a, float), np.asarray(b, float)
    _check_number(first)
    _check_number(second)
    parts = [float(values.var(ddof=1)) / len(values) for values in (first, second)]
    weights = sum(part**2 / (len(v) - 1) for part, v in zip(parts, (first, second), strict=True))
    degrees = math.floor(sum(parts) ** 2 / weights + 1e-9) if weights else 1
    error = math.sqrt(sum(parts))
    return _interval(float(second.mean() - first.mean()), error, max(degrees, 1), None)


def sign_flip(differences: Sequence[float]) -> float:
    """Returns the two-sided p-value of the sign-flip permutation test of a mean difference of 0.

    If both settings are equal, each difference is as likely to have the other sign. The p-value is
    the share of all 2^n choices of signs whose mean is as far from 0 as the one observed (Fisher,
    "The Design of Experiments", 1935, section 21). It is exact for up to 20 differences, whatever
    their distribution; for more, random signs are drawn, and the observed ones count as one of them
    (Phipson and Smyth, "Permutation P-values Should Never Be Zero", 2010).

    Args:
      differences: For each seed, the metric of B less that of A.
    """
    values = np.abs(np.asarray(differences, float))
    # A sum that differs from the observed one by rounding alone must count.
    least = abs(math.fsum(differences)) - 1e-9 * values.sum()
    if len(values) <= _MOST_FLIPPED:
        sums = np.zeros(1)
        for value in values:
            sums = np.concatenate([sums + value, sums - value])
        return float((np.abs(sums) >= least).mean())
    generator = np.random.default_rng(0)
    reached = sum(
        int((np.abs(generator.choice((-1.0, 1.0), (1000, len(values))) @ values) >= least).sum())
        for _ in range(_RANDOM_FLIPS // 1000)
    )
    return (reached + 1) / (_RANDOM_FLIPS + 1)


@functools.cache
def quantile(degrees: int, level: float = LEVEL) -> float:
    """Returns the t for which Student's t lies between -t and t with a probability.

    Args:
      degrees: Degrees of freedom, at least 1.
      level: The probability, above 0 and below 1.
    """
    low, high = 0.0, math.pi / 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, degrees) < level else (low, middle)
    return math.sqrt(degrees) * math.tan(low)


def _within(angle: float, degrees: int) -> float:
    """Returns P(|T| < √degrees · tan(angle)) of Student's t.

    The finite series for whole degrees of freedom: Abramowitz and Stegun, "Handbook of Mathematical
    Functions", 1964, 26.7.3 and 26.7.4.
    """
    square = math.cos(angle) ** 2
    odd = degrees % 2
    factors = [(k - 1 + odd) / (k + odd) * square for k in range(2, degrees - 1, 2)]
    series = float(np.cumprod([1.0, *factors]).sum())
    if not odd:
        return math.sin(angle) * series
    if degrees == 1:
        series = 0.0
    return 2 / math.pi * (angle + math.sin(angle) * math.cos(angle) * series)


def _interval(mean: float, error: float, degrees: int, values: np.ndarray | None) -> Interval:
    # The deviation of equal numbers may be a rounding error in place of 0.
    size = abs(mean) if values is None else float(np.abs(values).max())
    half = quantile(degrees) * error
    return Interval(mean, mean - half, mean + half, degrees, error > 1e-12 * size)


def _check_number(values: np.ndarray) -> None:
    if len(values) < 2:
        raise ValueError(f"An interval needs at least two values, got {len(values)}.")
