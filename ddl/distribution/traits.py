"""Traits of each strategy, which the rest of ddl consults. Imports no TensorFlow.

A new strategy is a name in `ddl.choices`, an entry in `TRAITS`, and a builder in
`ddl.distribution.strategies`.
"""

import dataclasses
import operator
from typing import TYPE_CHECKING

from ddl.choices import StrategyName

if TYPE_CHECKING:
    import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Traits:
    """Traits of a strategy.

    Attributes:
      class_name: Path of the class in `tf.distribute`.
      several_processes: Whether the strategy joins several processes of a cluster.
      asynchronous: Whether a chief schedules updates on workers that do not wait for each other,
        with the variables on parameter servers.
      shares_variables: Whether all replicas write the same copy of each variable.
      replicates_handles: Whether a variable has a handle for each core, so that none of its rows
        can be read alone.
      note: A note for the start of a run, or "".
    """

    class_name: str
    several_processes: bool = False
    asynchronous: bool = False
    shares_variables: bool = False
    replicates_handles: bool = False
    note: str = ""


TRAITS: dict[StrategyName, Traits] = {
    "one_device": Traits("OneDeviceStrategy"),
    "mirrored": Traits("MirroredStrategy"),
    "multi_worker_mirrored": Traits("MultiWorkerMirroredStrategy", several_processes=True),
    "parameter_server": Traits(
        "ParameterServerStrategy",
        several_processes=True,
        asynchronous=True,
        note="Updates are asynchronous: each worker computes one from a whole global batch, while "
        "others change the weights. Runs with several workers are not reproducible. "
        "BatchNormalization normalizes with the moments of the worker's own batch.",
    ),
    "central_storage": Traits("experimental.CentralStorageStrategy", shares_variables=True),
    "tpu": Traits(
        "TPUStrategy",
        replicates_handles=True,
        note="This strategy has not been run on TPUs yet. Use PRECISION = 'mixed_bfloat16'.",
    ),
}


def traits_of(strategy: "tf.distribute.Strategy") -> Traits:
    """Returns the traits of a strategy; for TensorFlow's default strategy, those of one device."""
    import tensorflow as tf

    for traits in TRAITS.values():
        if isinstance(strategy, operator.attrgetter(traits.class_name)(tf.distribute)):
            return traits
    return TRAITS["one_device"]
