"""What makes the step fast, held without a clock: counts of traces, operations and fetches."""

import collections

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from tests.conftest import make_strategy

# Of the perceptron below. A change that needs more operations may raise these, knowing what they
# cost: python -m benchmarks.loop_overhead.
MOST_OPERATIONS = {
    ("one_device", 1, "auto"): 110,
    ("mirrored", 2, "auto"): 230,
    ("one_device", 1, False): 105,
}
# Each costs three operations more in every step, besides what is computed of it.
MOST_CARRIED = {
    ("one_device", 1, "auto"): 14,
    ("mirrored", 2, "auto"): 15,
    ("one_device", 1, False): 10,
}


def trainer(strategy, **arguments):
    random = np.random.default_rng(0)
    data = random.integers(0, 256, (64, 28, 28, 1)).astype("u1"), random.integers(0, 10, 64)
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = ddl.models.mlp((28, 28, 1), 10, hidden_units=(128,), dropout=0.2)
        arguments = {"global_batch_size": 16, "steps_per_loop": 10} | arguments
        return ddl.Trainer(ddl.Classification(model), keras.optimizers.Adam(), data, **arguments)


def operations(trained):
    """Of one step: types of the operations, with what is called from it; and tensors carried."""
    loop = trained._runner.loop
    graph = loop._concrete(trained.state).graph.as_graph_def()
    functions = {function.signature.name: function for function in graph.library.function}
    nodes = graph.node
    (inner,) = [node for node in nodes if node.op in ("While", "StatelessWhile")]
    nodes = functions[inner.attr["body"].func.name].node_def

    def types(function):
        for node in function.node_def:
            yield node.op
            for attribute in node.attr.values():
                if attribute.HasField("func") and attribute.func.name in functions:
                    yield from types(functions[attribute.func.name])

    body = functions[inner.attr["body"].func.name]
    carried = [given for given in body.signature.input_arg if given.type != tf.resource]
    return collections.Counter(types(body)), len(carried)


def test_one_microbatch_is_in_memory_at_a_time():
    """TensorFlow's default of 10 iterations at a time would keep the activations of all of them."""
    trained = trainer(make_strategy("one_device", 1), accumulation_steps=4)
    graph = trained._runner.loop._concrete(trained.state).graph.as_graph_def()
    nodes = [*graph.node, *(n for function in graph.library.function for n in function.node_def)]
    loops = [node for node in nodes if node.op in ("While", "StatelessWhile")]
    assert sorted(node.attr["parallel_iterations"].i for node in loops) == [1, 10]


@pytest.mark.parametrize(("name", "replicas", "data_on_device"), MOST_OPERATIONS)
def test_operations_of_a_step(name, replicas, data_on_device):
    trained = trainer(make_strategy(name, replicas), data_on_device=data_on_device)
    counts, carried = operations(trained)
    variables = 4
    assert counts["ResourceApplyAdam"] == variables * replicas
    assert counts["IteratorGetNext"] == (data_on_device is False)
    # One for each gradient, which CPU devices need not pack, and one for all metric sums.
    assert counts["AddN"] == (variables + 1 if replicas > 1 else 0)
    most = MOST_OPERATIONS[name, replicas, data_on_device]
    assert sum(counts.values()) - counts["Const"] <= most, counts
    assert carried <= MOST_CARRIED[name, replicas, data_on_device]
    assert not [kind for kind in counts if "PyFunc" in kind or kind in ("Print", "RemoteCall")]


def test_no_sum_of_three_whose_order_is_by_chance():
    """See `ddl.step.fixed_order`: not between replicas, not in a norm, not in a gradient."""
    trained = trainer(make_strategy("mirrored", 4), clip_norm=1.0)
    graph = trained._runner.loop._concrete(trained.state).graph.as_graph_def()
    nodes = [n for function in graph.library.function for n in function.node_def]
    sums = [node for node in nodes if node.op == "AddN"]
    assert sums
    assert {node.attr["N"].i for node in sums} == {2}


def test_one_reduce_an_update(monkeypatch):
    """All gradients in one call, and all sums in another, whatever the model."""
    strategy = make_strategy("mirrored", 2)
    trained = trainer(strategy, accumulation_steps=4)
    extended = type(strategy.extended)
    calls = []
    for method in ("_batch_reduce_to", "_reduce_to"):
        plain = getattr(extended, method)

        def counted(self, *args, method=method, plain=plain, **kwargs):
            calls.append(method)
            return plain(self, *args, **kwargs)

        monkeypatch.setattr(extended, method, counted)
    trained.train(2)
    assert sorted(calls) == ["_batch_reduce_to", "_reduce_to"]
