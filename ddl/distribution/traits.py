"""Traits of each strategy, which the rest of ddl consults. Imports no TensorFlow.

A new strategy is a name in `ddl.choices`, an entry in `TRAITS`, and a builder in
`ddl.distribution.strategies`.
"""

import dataclasses
import operator
from typing import TYPE_CHECKING, Literal, NamedTuple

from ddl.choices import StrategyName

if TYPE_CHECKING:
    import tensorflow as tf


class Note(NamedTuple):
    """A line at the start of a run.

    Attributes:
      text: The line.
      applies: "always", to models "with batch normalization", or to runs
        "without mixed_bfloat16".
    """

    text: str
    applies: Literal["always", "with batch normalization", "without mixed_bfloat16"] = "always"


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
      notes: Notes for the start of a run.
    """

    class_name: str
    several_processes: bool = False
    asynchronous: bool = False
    shares_variables: bool = False
    replicates_handles: bool = False
    notes: tuple[Note, ...] = ()

    @property
    def workers_are_equal(self) -> bool:
        """Whether several processes each run the whole program and wait for each other."""
        return self.several_processes and not self.asynchronous

    @property
    def can_share_slots(self) -> bool:
        """Whether each replica can keep its share of the optimizer's slots alone."""
        return not (self.asynchronous or self.shares_variables or self.replicates_handles)


TRAITS: dict[StrategyName, Traits] = {
    "one_device": Traits("OneDeviceStrategy"),
    "mirrored": Traits("MirroredStrategy"),
    "multi_worker_mirrored": Traits("MultiWorkerMirroredStrategy", several_processes=True),
    "parameter_server": Traits(
        "ParameterServerStrategy",
        several_processes=True,
        asynchronous=True,
        notes=(
            Note(
                "Updates are asynchronous: one worker computes each update from a whole global "
                "batch, while other workers may change the weights. With several workers, neither "
                "fresh nor resumed runs are reproducible. The learning rate follows the step, "
                "whichever worker makes the update."
            ),
            Note(
                "BatchNormalization normalizes with the moments of the worker's own batch. All "
                "workers write the moving moments, and one of two simultaneous writes is lost.",
                "with batch normalization",
            ),
        ),
    ),
    "central_storage": Traits("experimental.CentralStorageStrategy", shares_variables=True),
    "tpu": Traits(
        "TPUStrategy",
        replicates_handles=True,
        notes=(
            Note(
                "TPUs multiply in bfloat16: PRECISION = 'mixed_bfloat16' is fastest there and "
                "needs no loss scale. This strategy has not been run on TPU hardware yet.",
                "without mixed_bfloat16",
            ),
        ),
    ),
}


def traits_of(strategy: "tf.distribute.Strategy") -> Traits:
    """Returns the traits of a strategy; for TensorFlow's default strategy, those of one device."""
    import tensorflow as tf

    for traits in TRAITS.values():
        if isinstance(strategy, operator.attrgetter(traits.class_name)(tf.distribute)):
            return traits
    return TRAITS["one_device"]


def name_of(strategy: "tf.distribute.Strategy") -> StrategyName:
    """Returns the name of a strategy, as --strategy takes it."""
    traits = traits_of(strategy)
    return next(name for name, own in TRAITS.items() if own is traits)


def strategy_of_cluster(workers: int, has_servers: bool) -> StrategyName | None:
    """Returns the name of the strategy for a cluster; None for one process alone.

    Args:
      workers: Number of workers.
      has_servers: Whether the cluster has parameter servers.
    """
    if has_servers:
        return "parameter_server"
    return "multi_worker_mirrored" if workers > 1 else None
