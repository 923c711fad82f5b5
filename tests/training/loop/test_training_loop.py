"""The position of the training loop in the data, without a trace."""

from types import SimpleNamespace

import tensorflow as tf

from ddl.step.state import TrainingState
from ddl.training.loop import TrainingLoop


class Pipeline:
    """Notes the batch from which each iterator is asked for."""

    source = None

    def __init__(self, in_graph=False):
        self.begun = []
        self.in_graph = in_graph

    def orders_in_graph(self, strategy):
        return self.in_graph

    def distributes(self, strategy):
        return False

    def iterator(self, strategy, first_update):
        self.begun.append(first_update)
        return iter(())


def loop_over(pipeline):
    return TrainingLoop(SimpleNamespace(pipelines={"": pipeline}, strategy=None), 1, None)


def test_an_iterator_serves_the_state_it_stands_at_and_no_other():
    pipeline = Pipeline()
    loop, state = loop_over(pipeline), TrainingState.initial(1.0, tf.zeros([2], tf.float64))
    for each in (state, state, state.without_metrics()):
        loop._prepare_iterator(each)
    assert pipeline.begun == [0]
    # Restored, to where the iterator stands and to another batch.
    for batch in (0, 7):
        loop._prepare_iterator(state._replace(batches=tf.constant(batch, tf.int64)))
    assert pipeline.begun == [0, 0, 7]


def test_batches_ordered_in_the_graph_need_no_iterator():
    pipeline = Pipeline(in_graph=True)
    loop_over(pipeline)._prepare_iterator(TrainingState.initial(1.0, tf.zeros([2], tf.float64)))
    assert not pipeline.begun
