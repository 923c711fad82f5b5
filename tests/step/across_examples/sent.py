"""The bytes that the collectives of an update send for `ddl.gather`.

  python -m tests.step.across_examples.sent

prints those of each example on a worker of a cluster, as a line of JSON.
"""

import json
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import keras
import tensorflow as tf
from tensorflow.python.ops import collective_ops

import ddl
from ddl import config
from ddl.distribution.communication import Communication
from ddl.distribution.workers import Workers
from ddl.run import train
from tests.run.whole_runs import ROOT, SMALL

EXAMPLES = {"simclr": SMALL, "clip": (), "triplets": SMALL, "vicreg": SMALL}
"""The examples that gather, and the parameters with which they are traced soon."""


class Sent(NamedTuple):
    """Bytes that a replica sends to each other replica in an update.

    Attributes:
      forward: By the collectives that gather.
      backward: By those that scatter.
      rows: What one all-gather of the gathered tensors would send: the replica's own rows.
      floats: The same of the tensors that have gradients.
    """

    forward: float
    backward: float
    rows: int
    floats: int

    def check(self) -> None:
        """Checks the cost: at most a tenth more than the rows there, and their gradients back."""
        assert self.rows <= self.forward <= 1.1 * self.rows, self
        assert self.floats <= self.backward <= 1.1 * self.floats, self


def of_example(example: str, strategy: tf.distribute.Strategy, accumulation_steps: int = 1) -> Sent:
    """Traces the update of an example; all replicas send as much."""
    keras.utils.clear_session()
    params = [*EXAMPLES[example], f"ACCUMULATION_STEPS = {accumulation_steps}"]
    config.load([f"{ROOT}/examples/{example}.gin"], params)
    trainer = train.build(train.Placement(strategy, Communication()), Workers(strategy))[1]
    return sent(trainer)


def sent(trainer: ddl.Trainer) -> Sent:
    """Traces the loop over updates, and counts the bytes that its collectives are given."""
    loop, strategy = trainer._runner.loop, trainer.strategy
    replicas, found = strategy.num_replicas_in_sync, {"gather": 0.0, "scatter": 0.0}

    def counted(kind: str, collective: Callable[..., Any]) -> Callable[..., Any]:
        def call(values: tf.Tensor, *args: Any, **kwargs: Any) -> Any:
            size = values.shape.num_elements() * values.dtype.size
            # A scatter takes a part for each replica, and sends each its own.
            found[kind] += size if kind == "gather" else size / replicas
            return collective(values, *args, **kwargs)

        return call

    with (
        mock.patch.object(
            collective_ops, "all_gather_v2", counted("gather", collective_ops.all_gather_v2)
        ),
        mock.patch.object(
            collective_ops, "all_to_all_v2", counted("scatter", collective_ops.all_to_all_v2)
        ),
    ):
        loop._loop.get_concrete_function(
            loop._iterator_from(trainer.state), tf.constant(0, tf.int64), trainer.state
        )
    local = Workers(strategy).replicas_of_each
    plan, pipelines = trainer._parts.update.plan, trainer.pipelines
    rows = floats = 0
    for name, objective in plan.losses.items():
        own = pipelines[plan.sources[name]].global_batch_size // replicas
        for spec in (spec for call in objective.gathers for spec in call.specs):
            size = own * spec.shape.num_elements() * spec.dtype.size
            rows += size
            floats += size if spec.dtype.is_floating else 0
    return Sent(found["gather"] / local, found["scatter"] / local, rows, floats)


def main() -> None:
    from ddl.distribution.strategies import build_strategy

    strategy = build_strategy("multi_worker_mirrored")
    found = {example: of_example(example, strategy) for example in EXAMPLES}
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
