"""The position of the training loop in the data, without a trace."""

from types import SimpleNamespace

import tensorflow as tf

from ddl.step.state import TrainingState
from ddl.training.loop import TrainingLoop
from tests.conftest import make_strategy


class Pipeline:
    """Notes the batch from which each iterator is asked for."""

    source = None

    def __init__(self, resident=False):
        self.begun = []
        self.resident = resident
        self.global_batch_size = self.batches_per_update = 1

    def iterator(self, strategy, first_update):
        self.begun.append(first_update)
        return iter(())


def loop_over(pipeline):
    strategy = make_strategy("one_device", 1)
    return TrainingLoop(SimpleNamespace(pipelines={"": pipeline}, strategy=strategy), 1, None)


def test_an_iterator_serves_the_state_it_stands_at_and_no_other():
    pipeline = Pipeline()
    loop, state = loop_over(pipeline), TrainingState.initial(1.0, tf.zeros([2], tf.float64))
    for each in (state, state, state.without_metrics()):
        loop._prepare_iterators(each)
    assert pipeline.begun == [0]
    # Restored, to where the iterator stands and to another batch.
    for batch in (0, 7):
        loop._prepare_iterators(state._replace(batches=tf.constant(batch, tf.int64)))
    assert pipeline.begun == [0, 0, 7]


def test_resident_arrays_need_no_iterator():
    pipeline = Pipeline(resident=True)
    loop_over(pipeline)._prepare_iterators(TrainingState.initial(1.0, tf.zeros([2], tf.float64)))
    assert not pipeline.begun
