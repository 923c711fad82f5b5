"""Norms and histograms of gradient, weights and update of each layer."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from ddl.distribution.traits import traits_of
from ddl.errors import ConfigError, check_choice
from ddl.figures import HISTOGRAMS_OF_LAYERS, OF_LAYERS
from ddl.step.gradients import Gradient, values_of
from ddl.step.monitoring.histograms import BINS, Histogram, counts_of


@dataclasses.dataclass(frozen=True)
class LayerNorms:
    """Logs the norms of gradient, weights and update of each layer.

    The norm of a layer is that of all its trained variables together. The gradient is that of the
    global batch, with penalties and before clipping; the weights are those before the update; the
    update is the difference that the optimizer makes. A log line holds the means of these norms
    over the updates since the last line. They are the same for any number of replicas, up to
    rounding. Updates that are skipped do not count. Where a step applies the variables of one layer
    by several calls of `update.apply`, the mean is over the norms of these parts.

    An update reads the weights before and after the optimizer, and keeps a copy of them meanwhile.

    With `histogram_every`, the entries of gradient, weights and update of each layer are also
    counted in bins (`ddl.step.monitoring.histograms`). A log line gets the sums of these counts
    over the counted updates since the last line.

    Attributes:
      by: "layer", or "variable" for the norms of each variable.
      histogram_every: Counts histograms in each update whose number is a multiple of it; None
        counts none.

    Raises:
      ConfigError: If `by` is something else, or `histogram_every` is no positive whole number.
    """

    by: Literal["layer", "variable"] = "layer"
    histogram_every: int | None = None

    def __post_init__(self) -> None:
        check_choice("LayerNorms.by", self.by, ("layer", "variable"))
        every = self.histogram_every
        if every is not None and (type(every) is not int or every < 1):
            raise ConfigError(
                f"LayerNorms.histogram_every must be a whole number of updates of at least 1, or "
                f"None, got {every!r}. Set it to the period of the log, LOG_EVERY, for instance."
            )

    def of(
        self, variables: Sequence[keras.Variable], strategy: tf.distribute.Strategy
    ) -> "NormsOfLayers":
        """Returns the computation of the norms of variables.

        Args:
          variables: The variables of all optimizers, each once.
          strategy: The strategy.

        Raises:
          ConfigError: If other workers change the variables during an update.
        """
        if traits_of(strategy).asynchronous:
            raise ConfigError(
                "Trainer.layer_norms needs updates one after the other, but with "
                "--strategy=parameter_server the workers update independently. Leave layer_norms "
                "out, or use another strategy."
            )
        # The name of the only model is left out: Keras numbers the models of a process.
        models = {variable.path.partition("/")[0] for variable in variables}
        nested = all(variable.path.count("/") > 1 for variable in variables)
        prefix = f"{models.pop()}/" if len(models) == 1 and nested else ""
        paths = [variable.path.removeprefix(prefix) for variable in variables]
        layers = [path.rpartition("/")[0] if self.by == "layer" else path for path in paths]
        layers = [layer or path for layer, path in zip(layers, paths, strict=True)]
        taken, names, places = set(layers), dict[str, int](), {}
        shown = dict(zip(layers, layers, strict=True))
        seen: dict[str, set[str]] = {layer: set() for layer in layers}
        for variable, path, layer in zip(variables, paths, layers, strict=True):
            if path in seen[layer]:  # another layer of this name, in another model
                numbered = (f"{layer}_{number}" for number in itertools.count(2))
                shown[layer] = next(name for name in numbered if name not in taken)
                taken.add(shown[layer])
                seen[layer] = set()
            seen[layer].add(path)
            places[id(variable)] = names.setdefault(shown[layer], len(names))
        return NormsOfLayers(tuple(names), places, self.histogram_every)


class OfLayers(NamedTuple):
    """A state's sums of `NormsOfLayers`, each for all layers.

    Attributes:
      norms: Sums of the norms of gradient, weights and update, float64 [3, layers].
      histograms: Counts in bins, of the same, float64 [3, layers, bins].
      updates: Number of updates, float64 [layers].
    """

    norms: np.ndarray
    histograms: np.ndarray
    updates: np.ndarray


@dataclasses.dataclass(frozen=True)
class NormsOfLayers:
    """Computes norms and histograms of layers, and adds them up.

    Attributes:
      names: Names of the layers.
      places: Place of a variable's layer among them, by the id of the variable.
      histogram_every: See `LayerNorms`.
    """

    names: Sequence[str]
    places: dict[int, int]
    histogram_every: int | None = None

    @property
    def size(self) -> int:
        """Number of values: the sums of three norms, three histograms, and a count, by layer."""
        return (3 * self._width + 1) * len(self.names)

    @property
    def _width(self) -> int:
        """Number of values of a layer's gradient, weights or update."""
        return 1 if self.histogram_every is None else 1 + BINS

    def of_gradients(
        self, gradients: Sequence[Gradient], variables: Sequence[keras.Variable], step: tf.Tensor
    ) -> tf.Tensor:
        """Returns the norm of each layer's gradient, then its counts in bins. Replica context.

        Args:
          gradients: A gradient for each variable; sparse ones hold each row once.
          variables: Some of the variables.
          step: Number of updates made before this one, int64 [].

        Returns:
          float64 [layers], or with histograms [layers · (1 + bins)].
        """
        values = [values_of(gradient) for gradient in gradients]
        # The entries of rows that a sparse gradient does not hold are 0.
        absent = [
            _entries(variable) - tf.size(value, tf.int64) if value is not gradient else None
            for value, gradient, variable in zip(values, gradients, variables, strict=True)
        ]
        return self._of(values, variables, step, absent)

    def of_shares(
        self,
        shares: Sequence[tf.Tensor],
        entries: Sequence[int],
        variables: Sequence[keras.Variable],
        step: tf.Tensor,
    ) -> tf.Tensor:
        """Returns what `of_totals` expects the sum of, over the replicas. Replica context.

        Args:
          shares: This replica's share of the gradient of each variable.
          entries: Number of entries of each share without padding.
          variables: Some of the variables.
          step: As in `of_gradients`.
        """
        own = self._of(shares, variables, step, entries=entries)
        layers = len(self.names)
        return tf.concat([tf.square(own[:layers]), own[layers:]], axis=0)

    def of_totals(self, totals: tf.Tensor) -> tf.Tensor:
        """Returns the values of `of_gradients` from the sums of `of_shares`."""
        layers = len(self.names)
        return tf.concat([tf.sqrt(totals[:layers]), totals[layers:]], axis=0)

    def read(self, variables: Sequence[keras.Variable]) -> list[tf.Tensor]:
        """Returns the values of variables, which later updates do not change. Replica context."""
        return [tf.identity(variable.value) for variable in variables]

    def of_weights(
        self, before: Sequence[tf.Tensor], variables: Sequence[keras.Variable], step: tf.Tensor
    ) -> tf.Tensor:
        """Returns values after an update, float64 [size - size of `of_gradients`]. Replica context.

        Args:
          before: Values of the variables before the update.
          variables: Some of the variables.
          step: As in `of_gradients`.

        Returns:
          As `of_gradients` returns them, the values of the weights before the update and those of
          the update; and 1 for a layer with any of the variables or else 0.
        """
        after = [variable.value for variable in variables]
        moved = [new - old for new, old in zip(after, before, strict=True)]
        covered = np.zeros(len(self.names))
        covered[[self.places[id(variable)] for variable in variables]] = 1.0
        found = [self._of(before, variables, step), self._of(moved, variables, step)]
        return tf.concat([*found, tf.constant(covered, tf.float64)], axis=0)

    def _of(
        self,
        values: Sequence[tf.Tensor],
        variables: Sequence[keras.Variable],
        step: tf.Tensor,
        absent: Sequence[tf.Tensor | None] | None = None,
        entries: Sequence[int] | None = None,
    ) -> tf.Tensor:
        """Returns norms, then counts in bins.

        Args:
          values: Values of the variables.
          variables: Some of the variables.
          step: Number of updates made before this one, int64 [].
          absent: Number of further values of each that are 0, or None.
          entries: Number of first values of each that count, the others being padding; None: all.
        """
        wide = [tf.cast(value, _at_least_float32(value.dtype)) for value in values]
        norms = self._norms(wide, variables)
        if self.histogram_every is None:
            return norms

        def counts() -> tf.Tensor:
            counted = wide
            if entries is not None:
                counted = [x[:number] for x, number in zip(wide, entries, strict=True)]
            return self._counts(counted, variables, absent or [None] * len(wide))

        def none() -> tf.Tensor:
            return tf.zeros([len(self.names) * BINS], tf.float64)

        if self.histogram_every == 1:
            found = counts()
        else:  # counting takes longer than a small update
            found = tf.cond((step + 1) % self.histogram_every == 0, counts, none)
        return tf.concat([norms, found], axis=0)

    def _norms(self, values: Sequence[tf.Tensor], variables: Sequence[keras.Variable]) -> tf.Tensor:
        """Returns the norm of the values of each layer; 0 for a layer without values."""
        halves: list[list[tf.Tensor]] = [[] for _ in self.names]
        for value, variable in zip(values, variables, strict=True):
            half = tf.nn.l2_loss(value)
            halves[self.places[id(variable)]].append(tf.cast(half, tf.float64))
        zero = tf.zeros([], tf.float64)
        return tf.sqrt(2 * tf.stack([tf.add_n(own) if own else zero for own in halves]))

    def _counts(
        self,
        values: Sequence[tf.Tensor],
        variables: Sequence[keras.Variable],
        absent: Sequence[tf.Tensor | None],
    ) -> tf.Tensor:
        """Returns the counts in bins of the values of each layer, float64 [layers · bins]."""
        counts: list[list[tf.Tensor]] = [[] for _ in self.names]
        for value, variable, zeros in zip(values, variables, absent, strict=True):
            counts[self.places[id(variable)]].append(counts_of(value, zeros))
        zero = tf.zeros([BINS], tf.float64)
        return tf.concat([tf.add_n(own) if own else zero for own in counts], axis=0)

    def figures(self, sums: Any) -> dict[str, float]:
        """Returns the means of the norms by the names of their figures.

        Args:
          sums: Sums of norms and counts, float64 [size]; a layer without a count has no figures.
        """
        found = self._parted(sums)
        return {
            f"{figure}/{name}": float(total / count)
            for figure, totals in zip(OF_LAYERS, found.norms, strict=True)
            for name, total, count in zip(self.names, totals, found.updates, strict=True)
            if count
        }

    def histograms(self, sums: Any) -> dict[str, Histogram]:
        """Returns the histograms with any entry, by their names; the argument as in `figures`."""
        if self.histogram_every is None:
            return {}
        return {
            f"{figure}/{name}": Histogram(counts)
            for figure, of_layers in zip(
                HISTOGRAMS_OF_LAYERS, self._parted(sums).histograms, strict=True
            )
            for name, counts in zip(self.names, of_layers, strict=True)
            if counts.any()
        }

    def _parted(self, sums: Any) -> OfLayers:
        layers = len(self.names)
        values = np.asarray(sums)
        of_each = values[: len(values) - layers].reshape(3, -1)
        histograms = of_each[:, layers:].reshape(3, layers, self._width - 1)
        return OfLayers(of_each[:, :layers], histograms, values[len(values) - layers :])


def _entries(variable: keras.Variable) -> int:
    return int(np.prod(variable.shape))


def _at_least_float32(dtype: tf.DType) -> tf.DType:
    """Returns a dtype in which the squares of weights do not overflow."""
    return dtype if dtype.size >= 4 else tf.float32
