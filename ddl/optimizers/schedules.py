"""Learning rate schedules that Keras lacks, in float64, over updates counted from 0."""

import math
from collections.abc import Sequence
from typing import Any, Literal

import keras
import tensorflow as tf

from ddl.errors import ConfigError, check_choice
from ddl.optimizers.schedule import Schedule


@keras.saving.register_keras_serializable("ddl")
class StepDecay(Schedule):
    """Step decay: the rate is multiplied by a factor at each boundary.

    The rate of update s is η · factor^(number of boundaries ≤ s), the schedule of He et al. 2016,
    "Deep residual learning", and Goyal et al. 2017. Keras's `PiecewiseConstantDecay` still uses
    the earlier rate for update s = boundary.
    """

    def __init__(
        self, initial_learning_rate: float, boundaries: Sequence[int], factor: float = 0.1
    ):
        """Initializes the schedule.

        Args:
          initial_learning_rate: η, more than 0.
          boundaries: Updates at which the rate changes, at least 0 and strictly increasing.
          factor: Factor of the rate at each boundary, more than 0.

        Raises:
          ConfigError: If the boundaries are not increasing, or a number is out of range.
        """
        _check_positive(initial_learning_rate=initial_learning_rate, factor=factor)
        self.initial_learning_rate = initial_learning_rate
        self.boundaries = list(boundaries)
        self.factor = factor
        if self.boundaries != sorted(set(self.boundaries)) or min(self.boundaries, default=0) < 0:
            raise ConfigError(
                "StepDecay.boundaries must increase strictly and start at 0 or later, got "
                f"{self.boundaries}."
            )

    def __call__(self, step: Any) -> tf.Tensor:
        """Returns the rate of update `step` (int [], counted from 0): float64 []."""
        passed = tf.constant(self.boundaries, tf.int64) <= tf.cast(step, tf.int64)
        powers = tf.constant(
            [self.initial_learning_rate * self.factor**n for n in range(len(self.boundaries) + 1)],
            tf.float64,
        )
        return powers[tf.math.count_nonzero(passed)]


@keras.saving.register_keras_serializable("ddl")
class CosineWithRestarts(Schedule):
    """Cosine decay with warm restarts: Loshchilov & Hutter 2017, "SGDR".

    Period i has length T·m^i. After a fraction x of period i the rate is
    η · (a + (1 − a) · p^i · (1 + cos πx) / 2), with T `first_decay_steps`, m `t_mul`, p `m_mul` and
    a `alpha`. The arguments are those of Keras's `CosineDecayRestarts`, which misses some restarts
    in float64.
    """

    def __init__(
        self,
        initial_learning_rate: float,
        first_decay_steps: int,
        t_mul: float = 2.0,
        m_mul: float = 1.0,
        alpha: float = 0.0,
    ):
        """Initializes the schedule.

        Args:
          initial_learning_rate: η, more than 0.
          first_decay_steps: T, length of the first period in updates, more than 0.
          t_mul: m, factor of the length from one period to the next, at least 1.
          m_mul: p, factor of the peak from one period to the next, more than 0.
          alpha: a, the lowest rate as a fraction of η, from 0 to 1.

        Raises:
          ConfigError: If a number is out of range.
        """
        _check_positive(
            initial_learning_rate=initial_learning_rate,
            first_decay_steps=first_decay_steps,
            m_mul=m_mul,
        )
        if not 1 <= t_mul < math.inf:
            raise ConfigError(f"CosineWithRestarts.t_mul must be at least 1, got {t_mul}.")
        if not 0 <= alpha <= 1:
            raise ConfigError(f"CosineWithRestarts.alpha must be from 0 to 1, got {alpha}.")
        self.initial_learning_rate = initial_learning_rate
        self.first_decay_steps = first_decay_steps
        self.t_mul = t_mul
        self.m_mul = m_mul
        self.alpha = alpha

    def __call__(self, step: Any) -> tf.Tensor:
        """Returns the rate of update `step` (int [], counted from 0): float64 []."""
        done = tf.cast(step, tf.float64) / self.first_decay_steps
        if self.t_mul == 1:
            period = tf.floor(done)
            share = done - period
        else:
            # At the start of a period, rounding errors are a few bits, far less than one step.
            near = tf.round(tf.math.log1p(done * (self.t_mul - 1)) / math.log(self.t_mul))
            begins_near = (self.t_mul**near - 1) / (self.t_mul - 1)
            period = tf.where(done < begins_near * (1 - 1e-12), near - 1, near)
            begins = (self.t_mul**period - 1) / (self.t_mul - 1)
            share = tf.maximum(done - begins, 0) / self.t_mul**period
        cosine = self.m_mul**period * (1 + tf.cos(math.pi * share)) / 2
        return self.initial_learning_rate * (self.alpha + (1 - self.alpha) * cosine)


@keras.saving.register_keras_serializable("ddl")
class ReciprocalSquareRoot(Schedule):
    """Reciprocal square root decay: the rate of update s is η / √(1 + s / timescale).

    After a warm-up of W = `timescale` updates it equals the schedule of Vaswani et al. 2017,
    "Attention is all you need": η · √(W / step), with `step` counted from the start of the
    warm-up. It does not depend on the length of the training (Zhai et al. 2022, "Scaling vision
    transformers").
    """

    def __init__(self, initial_learning_rate: float, timescale: int):
        """Initializes the schedule.

        Args:
          initial_learning_rate: η, more than 0.
          timescale: In updates, more than 0.

        Raises:
          ConfigError: If a number is out of range.
        """
        _check_positive(initial_learning_rate=initial_learning_rate, timescale=timescale)
        self.initial_learning_rate = initial_learning_rate
        self.timescale = timescale

    def __call__(self, step: Any) -> tf.Tensor:
        """Returns the rate of update `step` (int [], counted from 0): float64 []."""
        return self.initial_learning_rate * tf.math.rsqrt(
            1 + tf.cast(step, tf.float64) / self.timescale
        )


@keras.saving.register_keras_serializable("ddl")
class OneCycle(Schedule):
    """One-cycle schedule: Smith & Topin 2018, "Super-convergence".

    With x = s / decay_steps at update s, the rate rises from `initial_share` · η at x = 0 to η at
    x = `rise`, then falls to `final_share` · η at x = 1 and stays there. Each part is half a cosine
    or linear. The momentum is not changed.
    """

    def __init__(
        self,
        peak_learning_rate: float,
        decay_steps: int,
        rise: float = 0.3,
        initial_share: float = 0.04,
        final_share: float = 4e-6,
        shape: Literal["cosine", "linear"] = "cosine",
    ):
        """Initializes the schedule.

        Args:
          peak_learning_rate: η, more than 0.
          decay_steps: Length of the whole cycle in updates, more than 0.
          rise: Fraction of the cycle in which the rate rises, between 0 and 1, both excluded.
          initial_share: First rate as a fraction of η, from 0 to 1.
          final_share: Last rate as a fraction of η, from 0 to 1.
          shape: Interpolation of both parts: half a cosine, or linear.

        Raises:
          ConfigError: If a number is out of range, or the shape is unknown.
        """
        _check_positive(peak_learning_rate=peak_learning_rate, decay_steps=decay_steps)
        check_choice("OneCycle.shape", shape, ("cosine", "linear"))
        shares = {"rise": rise, "initial_share": initial_share, "final_share": final_share}
        for name, share in shares.items():
            if not 0 <= share <= 1 or (name == "rise" and share in (0, 1)):
                raise ConfigError(
                    f"OneCycle.{name} must be "
                    f"{'between 0 and 1, both excluded' if name == 'rise' else 'from 0 to 1'}, got "
                    f"{share}."
                )
        self.peak_learning_rate = peak_learning_rate
        self.decay_steps = decay_steps
        self.rise = rise
        self.initial_share = initial_share
        self.final_share = final_share
        self.shape = shape

    def __call__(self, step: Any) -> tf.Tensor:
        """Returns the rate of update `step` (int [], counted from 0): float64 []."""
        done = tf.minimum(tf.cast(step, tf.float64) / self.decay_steps, 1.0)
        up = self._between(self.initial_share, 1.0, done / self.rise)
        down = self._between(1.0, self.final_share, (done - self.rise) / (1 - self.rise))
        return self.peak_learning_rate * tf.where(done < self.rise, up, down)

    def _between(self, first: float, last: float, done: tf.Tensor) -> tf.Tensor:
        if self.shape == "cosine":
            done = (1 - tf.cos(math.pi * done)) / 2
        return first + (last - first) * done


def _check_positive(**numbers: float) -> None:
    for name, number in numbers.items():
        if not 0 < number < math.inf:
            raise ConfigError(f"{name} must be greater than 0, got {number}.")
