"""Whole slots in the place of shares, in the objects that a checkpoint saves."""

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.trackable.base import VARIABLE_VALUE_KEY

from ddl.distribution.workers import Workers
from ddl.step.sharding import Sharding, copied_share, gathered

_Trackable: Any = tf.__internal__.tracking.Trackable


class WholeSlot(_Trackable):
    """A slot as a checkpoint holds it: of its weight's shape, without padding.

    Attributes:
      variable: The shares of this worker's replicas.
      shape: Shape of the whole.
      dtype: Its dtype.
    """

    _should_act_as_resource_variable = True  # so that a checkpoint holds `_shared_name` too

    def __init__(
        self, variable: tf.Variable, shape: tf.TensorShape, strategy: tf.distribute.Strategy
    ):
        """Keeps the arguments.

        Args:
          variable: The shares.
          shape: Shape of the whole.
          strategy: The strategy.
        """
        self.variable = variable
        self.shape = shape
        self.dtype: tf.DType = self.variable.dtype
        self._strategy = strategy
        self._workers = Workers(strategy)
        self._traced: Any = None

    @property
    def _shared_name(self) -> str:
        return self.variable._shared_name

    def whole(self) -> np.ndarray:
        """Gathers the whole. Eager, cross-replica context, on all workers."""
        if self._workers.number == 1:
            rows = np.concatenate([copy.numpy() for copy in self._copies()])
        else:
            # Not traced by a call: TensorFlow counts those of all slots together, and warns.
            self._traced = self._traced or self._gathered.get_concrete_function()
            rows = self._traced().numpy()
        return rows.ravel()[: self.shape.num_elements()].reshape(self.shape)

    @tf.function(autograph=False)
    def _gathered(self) -> tf.Tensor:
        """Returns the shares of all replicas: [replicas · entries of a share]."""
        replicas = self._strategy.num_replicas_in_sync
        shape = tf.TensorShape([replicas * self.variable.shape[0]])
        rows = self._strategy.run(lambda: gathered([self.variable.read_value()], [shape])[0])
        return self._strategy.experimental_local_results(rows)[0]

    def _copies(self) -> tuple[tf.Variable, ...]:
        return self._strategy.experimental_local_results(self.variable)

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        """Returns the name that a variable has; `Snapshots` gathers the value."""
        return {VARIABLE_VALUE_KEY: tf.zeros([], self.dtype)}

    def _restore_from_tensors(self, restored: Mapping[str, tf.Tensor]) -> None:
        """Assigns the shares of this worker's replicas."""
        value = restored[VARIABLE_VALUE_KEY]
        replicas = self._strategy.num_replicas_in_sync
        first = self._workers.index * self._workers.replicas_of_each
        for number, copy in enumerate(self._copies()):
            copy.assign(copied_share(value, first + number, replicas))


def with_whole_slots(optimizer: keras.optimizers.Optimizer, sharding: Sharding | None) -> Any:
    """Returns what a checkpoint saves of an optimizer: its objects, with whole slots and weights.

    The names in a checkpoint are those of an optimizer that has whole slots.

    Args:
      optimizer: The optimizer.
      sharding: The shares of its trainer; None returns the optimizer.
    """
    if sharding is None:
        return optimizer
    slots = {
        id_of: WholeSlot(shard.variable.value, shard.shape, sharding.strategy)
        for id_of, shard in sharding.slots.items()
    }

    def replaced(item: Any) -> Any:
        return slots.get(id(item), sharding.weight_of(item))

    view = tf.train.TrackableView(optimizer)
    children: dict[str, Any] = {}
    for name, child in view.children(optimizer).items():
        own = {} if isinstance(child, keras.Variable) else view.children(child)
        others = {key: replaced(item) for key, item in own.items()}
        is_same = all(others[key] is item for key, item in own.items())
        children[name] = replaced(child) if is_same else _Holder(others)
    return _Holder(children)


class _Holder(_Trackable):
    """Holds other objects under the names that a checkpoint uses."""

    def __init__(self, children: Mapping[str, Any]):
        self._own = dict(children)

    def _trackable_children(self, *_: Any, **__: Any) -> dict[str, Any]:
        return dict(self._own)

    def _lookup_dependency(self, name: str, *_: Any, **__: Any) -> Any:
        return self._own.get(name)
