"""Norms of gradient, weights and update of each layer."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf

from ddl.distribution.traits import traits_of
from ddl.errors import ConfigError, check_choice
from ddl.figures import OF_LAYERS
from ddl.step.gradients import Gradient, values_of


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

    Attributes:
      by: "layer", or "variable" for the norms of each variable.

    Raises:
      ConfigError: If `by` is something else.
    """

    by: Literal["layer", "variable"] = "layer"

    def __post_init__(self) -> None:
        check_choice("LayerNorms.by", self.by, ("layer", "variable"))

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
        return NormsOfLayers(tuple(names), places)


@dataclasses.dataclass(frozen=True)
class NormsOfLayers:
    """Computes norms of layers, and adds them up.

    Attributes:
      names: Names of the layers.
      places: Place of a variable's layer among them, by the id of the variable.
    """

    names: Sequence[str]
    places: dict[int, int]

    @property
    def size(self) -> int:
        """Number of values: the sums of three norms and a count for each layer."""
        return 4 * len(self.names)

    def of_gradients(
        self, gradients: Sequence[Gradient], variables: Sequence[keras.Variable]
    ) -> tf.Tensor:
        """Returns the norm of each layer's gradient, float64 [layers]. Replica context.

        Args:
          gradients: A gradient for each variable; sparse ones hold each row once.
          variables: Some of the variables.
        """
        return self._norms([values_of(gradient) for gradient in gradients], variables)

    def read(self, variables: Sequence[keras.Variable]) -> list[tf.Tensor]:
        """Returns the values of variables, which later updates do not change. Replica context."""
        return [tf.identity(variable.value) for variable in variables]

    def of_weights(
        self, before: Sequence[tf.Tensor], variables: Sequence[keras.Variable]
    ) -> tf.Tensor:
        """Returns norms after an update, float64 [3 · layers]. Replica context.

        Args:
          before: Values of the variables before the update.
          variables: Some of the variables.

        Returns:
          Norm of the weights before the update, norm of the update, and 1 for a layer with any of
          the variables or else 0, each for all layers.
        """
        after = [variable.value for variable in variables]
        moved = [new - old for new, old in zip(after, before, strict=True)]
        covered = np.zeros(len(self.names))
        covered[[self.places[id(variable)] for variable in variables]] = 1.0
        norms = [self._norms(before, variables), self._norms(moved, variables)]
        return tf.concat([*norms, tf.constant(covered, tf.float64)], axis=0)

    def _norms(self, values: Sequence[tf.Tensor], variables: Sequence[keras.Variable]) -> tf.Tensor:
        """Returns the norm of the values of each layer; 0 for a layer without values."""
        halves: list[list[tf.Tensor]] = [[] for _ in self.names]
        for value, variable in zip(values, variables, strict=True):
            half = tf.nn.l2_loss(tf.cast(value, _at_least_float32(value.dtype)))
            halves[self.places[id(variable)]].append(tf.cast(half, tf.float64))
        zero = tf.zeros([], tf.float64)
        return tf.sqrt(2 * tf.stack([tf.add_n(own) if own else zero for own in halves]))

    def figures(self, sums: Any) -> dict[str, float]:
        """Returns the means of the norms by the names of their figures.

        Args:
          sums: Sums of norms and counts, float64 [size]; a layer without a count has no figures.
        """
        *norms, counts = np.asarray(sums).reshape(4, -1)
        return {
            f"{figure}/{name}": float(total / count)
            for figure, totals in zip(OF_LAYERS, norms, strict=True)
            for name, total, count in zip(self.names, totals, counts, strict=True)
            if count
        }


def _at_least_float32(dtype: tf.DType) -> tf.DType:
    """Returns a dtype in which the squares of weights do not overflow."""
    return dtype if dtype.size >= 4 else tf.float32
