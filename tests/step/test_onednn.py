"""Max pooling in the training loop: its gradient has oneDNN's kernel at every start."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import test_util

import ddl
from ddl.step.onednn import needs_own_graph
from tests.conftest import make_strategy


def trainer(strategy, **arguments):
    keras.utils.clear_session()
    random = np.random.default_rng(0)
    data = random.random((64, 12, 12, 1), np.float32), random.integers(0, 10, 64)
    with strategy.scope():
        # Without dropout it would go well by chance.
        model = ddl.models.cnn((12, 12, 1), 10, block_dropout=0.25, hidden_dropout=0.5)
        arguments = {"global_batch_size": 16, "steps_per_loop": 3} | arguments
        return ddl.Trainer(
            ddl.Classification(model), keras.optimizers.Adam(1e-3), data, **arguments
        )


def inlined_into_loops(definition):
    """Types of the operations in the graphs of the loops, as TensorFlow runs them."""
    functions = {function.signature.name: function for function in definition.library.function}

    def types(function):
        for node in function.node_def:
            yield node.op
            for attribute in node.attr.values():
                called = functions.get(attribute.func.name)
                if called is not None and not called.attr["_noinline"].b:
                    yield from types(called)

    nodes = [*definition.node]
    for function in functions.values():
        nodes += function.node_def
    for node in nodes:
        if node.op in ("While", "StatelessWhile"):
            yield from types(functions[node.attr["body"].func.name])


@pytest.mark.parametrize(
    ("name", "replicas", "accumulation", "data_on_device"),
    [
        ("one_device", 1, 1, "auto"),
        ("one_device", 1, 2, False),
        ("mirrored", 2, 2, "auto"),
    ],
)
def test_it_is_not_in_the_graph_of_a_loop(name, replicas, accumulation, data_on_device):
    trained = trainer(
        make_strategy(name, replicas),
        accumulation_steps=accumulation,
        data_on_device=data_on_device,
    )
    loop = trained._runner.loop
    definition = loop._concrete(trained.state).graph.as_graph_def()
    everything = [n.op for f in definition.library.function for n in f.node_def]
    assert everything.count("MaxPoolGrad") == replicas
    of_loops = list(inlined_into_loops(definition))
    assert "StatefulPartitionedCall" in of_loops
    assert "MaxPoolGrad" not in of_loops


@pytest.mark.skipif(not test_util.IsMklEnabled(), reason="TensorFlow runs without oneDNN here")
def test_kernels(tmp_path):
    """Of three loops: in one graph with the loop, each would lose it by a chance of one in 5."""
    strategy = make_strategy("one_device", 1)
    for number in range(3):
        trained = trainer(strategy)
        trained.train(3)
        folder = tmp_path / str(number)
        tf.profiler.experimental.start(str(folder))
        trained.train(3)
        tf.profiler.experimental.stop()
        seen = b"".join(path.read_bytes() for path in folder.rglob("*.xplane.pb"))
        assert b":_MklNativeMaxPoolGrad" in seen
        assert b":MaxPoolGrad" not in seen


def graph_of(function, *shape):
    specification = tf.TensorSpec(shape, tf.float32)
    return tf.function(function).get_concrete_function(specification).graph


def test_what_loses_kernels():
    strategy = make_strategy("mirrored", 2)
    pooled = graph_of(lambda x: tf.nn.max_pool2d(x, 2, 2, "VALID"), 2, 8, 8, 1)
    assert needs_own_graph(pooled, strategy)
    assert not needs_own_graph(pooled, tf.distribute.OneDeviceStrategy("GPU:0"))
    in_depth = graph_of(lambda x: tf.nn.max_pool3d(x, 2, 2, "VALID"), 2, 8, 8, 8, 1)
    assert needs_own_graph(in_depth, strategy)
    called = tf.function(lambda x: tf.nn.max_pool2d(x, 2, 2, "VALID"))
    assert needs_own_graph(graph_of(lambda x: called(x) + 1, 2, 8, 8, 1), strategy)
    averaged = graph_of(lambda x: tf.nn.avg_pool2d(x, 2, 2, "VALID"), 2, 8, 8, 1)
    assert not needs_own_graph(averaged, strategy)
