"""The intervals of ddl compare: against SciPy's, and how often equal settings are called different.

The figures at the end are of real training: softmax regressions on ddl's digits, thousands at once.
"""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from ddl.compare.comparison import compare
from ddl.compare.intervals import paired, quantile, sign_flip, unpaired
from ddl.data.packaged.digits import load_digits


@pytest.mark.parametrize("degrees", [*range(1, 12), 29, 30, 199, 1000])
@pytest.mark.parametrize("level", [0.5, 0.95, 0.99])
def test_the_quantile_is_that_of_students_t(degrees, level):
    assert quantile(degrees, level) == pytest.approx(
        stats.t.ppf((1 + level) / 2, degrees), rel=1e-9
    )


@pytest.mark.parametrize("number", [2, 3, 8, 40])
def test_the_paired_interval_is_scipys(number):
    values = np.random.default_rng(number).normal(0.3, 1.0, number)
    expected = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    found = paired(values)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), rel=1e-9)
    assert found.degrees == number - 1
    assert found.spread


def test_the_unpaired_interval_is_scipys_but_for_rounded_degrees():
    generator = np.random.default_rng(0)
    for _ in range(20):
        a, b = generator.normal(0, 1, 5), generator.normal(1, 3, 9)
        expected = stats.ttest_ind(b, a, equal_var=False)
        found = unpaired(a, b)
        assert found.degrees == math.floor(expected.df)
        scale = quantile(found.degrees) / stats.t.ppf(0.975, expected.df)
        assert 1 <= scale < 1.1
        half = (expected.confidence_interval().high - expected.confidence_interval().low) / 2
        assert (found.high - found.low) / 2 == pytest.approx(half * scale, rel=1e-9)
        assert found.mean == pytest.approx(b.mean() - a.mean())
    # Equal variances and sizes: all degrees of freedom, not one less by a rounding error.
    assert unpaired([1.0, 2.0, 3.0], [2.0, 3.0, 4.0]).degrees == 4


def test_all_signs_are_counted():
    values = [0.1, -0.2, 0.5, 0.3, 0.3]
    means = [
        abs(sum(sign * value for sign, value in zip(signs, values, strict=True)))
        for signs in itertools.product((-1, 1), repeat=5)
    ]
    expected = sum(mean >= abs(sum(values)) - 1e-12 for mean in means) / 32
    assert sign_flip(values) == expected
    assert sign_flip([1.0, 1.0, 1.0]) == 0.25
    assert sign_flip([0.1, 0.2, -0.3]) == 1.0  # whose sum is a rounding error
    assert sign_flip([0.0, 0.0]) == 1.0


def test_many_differences_have_random_signs():
    generator = np.random.default_rng(1)
    values = generator.normal(0.4, 1.0, 40)
    assert sign_flip(values) == pytest.approx(stats.ttest_1samp(values, 0).pvalue, abs=0.01)
    assert 0 < sign_flip([1.0] * 40) < 2e-5


def test_values_without_spread_make_no_interval():
    """The deviation of equal numbers is a rounding error: an interval would have no width."""
    for values in ([0.1, 0.1], [0.1 + 0.2, 0.3, 0.3], [0.0, 0.0]):
        assert not paired(values).spread
        assert not paired(values).excludes_zero
    assert not unpaired([0.5, 0.5], [0.7, 0.7]).excludes_zero
    assert unpaired([0.5, 0.6], [0.7, 0.7]).spread


def test_an_interval_needs_two_values():
    with pytest.raises(ValueError, match="at least two values, got 1"):
        paired([1.0])


# ---------------------------------------------------------------- how often they are wrong

SHAPES = {
    "normal": lambda generator, size: generator.normal(0.9, 0.01, size),
    "heavy tails": lambda generator, size: generator.standard_t(3, size),
    "skewed": lambda generator, size: generator.exponential(1.0, size),
    # The accuracy on 360 digits has steps of 1/360.
    "counts": lambda generator, size: generator.binomial(360, 0.98, size) / 360,
}
MOST = 18
"""Of 200: 5% and chance. A right interval exceeds it once in 200 times; one with the normal
quantile in place of Student's does so for most of the cases below."""


def called_different(a, b, first):
    """Returns how many pairs of settings are called different.

    Args:
      a: Metric of A: [pairs, seeds].
      b: Metric of B: [pairs, seeds].
      first: First seed of B.
    """
    seeds, others = range(a.shape[1]), range(first, first + b.shape[1])
    return sum(
        compare(dict(zip(seeds, x, strict=True)), dict(zip(others, y, strict=True))).verdict
        == "different"
        for x, y in zip(a.tolist(), b.tolist(), strict=True)
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seeds", [2, 3, 5, 8])
@pytest.mark.parametrize("disjoint", [True, False])
def test_equal_settings_are_seldom_called_different(shape, seeds, disjoint):
    generator = np.random.default_rng(seeds)
    a, b = SHAPES[shape](generator, (2, 200, seeds))
    assert called_different(a, b, 1000 if disjoint else 0) <= MOST


@pytest.mark.parametrize("disjoint", [True, False])
def test_of_normal_values_nearly_5_percent_are(disjoint):
    """An interval that is too wide would hide differences."""
    generator = np.random.default_rng(0)
    a, b = generator.normal(size=(2, 4000, 5))
    number = called_different(a, b, 1000 if disjoint else 0)
    # Five standard deviations of chance; unpaired, fewer than 5%, since degrees are rounded down.
    assert 4000 * (0.03 if disjoint else 0.05) - 69 < number < 4000 * 0.05 + 69


@pytest.mark.parametrize("disjoint", [True, False])
def test_clear_differences_are_found(disjoint):
    generator = np.random.default_rng(0)
    a, b = generator.normal(size=(2, 200, 8))
    assert called_different(a, b + 3.0, 1000 if disjoint else 0) > 190


def accuracies(number):
    """Trains softmax regressions on the digits from different seeds; returns their accuracies.

    Args:
      number: Number of runs, which differ in the order of the examples.

    Returns:
      float64 [number].
    """
    (train, labels), (test, test_labels) = load_digits("train"), load_digits("test")
    train, test = (part.reshape(len(part), -1).astype(np.float32) / 16 for part in (train, test))
    targets = np.eye(10, dtype=np.float32)[labels]
    generator = np.random.default_rng(0)
    weights = np.zeros((number, 64, 10), np.float32)
    for _ in range(30):
        batch = generator.integers(0, len(train), (number, 16))
        inputs = train[batch]
        scores = inputs @ weights
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        errors = scores / scores.sum(-1, keepdims=True) - targets[batch]
        weights -= 0.5 / 16 * inputs.transpose(0, 2, 1) @ errors
    predicted = (test @ weights).argmax(-1)
    return (predicted == test_labels).mean(-1)


@pytest.fixture(scope="module")
def real():
    return accuracies(2000)


@pytest.mark.parametrize("disjoint", [True, False])
def test_a_real_setting_is_seldom_different_from_itself(real, disjoint):
    assert 0.7 < real.mean() < 0.95
    assert real.std() > 0.005
    a, b = real.reshape(2, 200, 5)
    assert called_different(a, b, 1000 if disjoint else 0) <= MOST
