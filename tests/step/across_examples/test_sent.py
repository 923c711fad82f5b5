"""`ddl.gather` sends hardly more than one all-gather of its rows, and their gradients back."""

import json

import pytest
import tensorflow as tf

from ddl.tasks import gather
from tests.distribution.whole_clusters import addresses, finish_all, start_worker
from tests.step.across_examples import sent
from tests.step.test_all_reduce import collectives


# Those of triplets are the narrowest rows, with labels.
@pytest.mark.parametrize("accumulation_steps", [1, 2])
@pytest.mark.parametrize(
    "example",
    [
        example if example == "triplets" else pytest.param(example, marks=pytest.mark.slow)
        for example in sent.EXAMPLES
    ],
)
def test_two_replicas(example, accumulation_steps):
    """By the collectives that several workers use."""
    sent.of_example(example, collectives(2), accumulation_steps).check()


@pytest.mark.slow
def test_two_workers():
    hosts = addresses(2)
    program = ("-m", "tests.step.across_examples.sent")
    ended = finish_all([start_worker(i, hosts, program=program) for i in range(2)])
    assert [status for status, _ in ended] == [0, 0], ended
    for _, output in ended:
        (line,) = [line for line in output.splitlines() if line.startswith("{")]
        found = {name: sent.Sent(*values) for name, values in json.loads(line).items()}
        assert found.keys() == sent.EXAMPLES.keys()
        for each in found.values():
            each.check()


def test_wider_rows_are_seen(monkeypatch):
    gathered = gather.gather_over_replicas

    def mutated(values):
        wide = [tf.cast(x, tf.float64) if x.dtype.is_floating else x for x in values]
        return [tf.cast(x, y.dtype) for x, y in zip(gathered(wide), values, strict=True)]

    monkeypatch.setattr(gather, "gather_over_replicas", mutated)
    with pytest.raises(AssertionError, match="Sent"):
        sent.of_example("clip", collectives(2)).check()
