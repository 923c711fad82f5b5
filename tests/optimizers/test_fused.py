import inspect
from concurrent.futures import ThreadPoolExecutor

import keras
import numpy as np
import pytest
import tensorflow as tf

from ddl import optimizers
from ddl.optimizers import fused
from ddl.step.gradients import prepare_optimizer
from tests.as_on_gpus import as_on_gpus
from tests.conftest import for_each_kind_on_two, make_strategy

SHAPES = ((40, 3), (5,), ())
NAMES = ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad")
# In float32 Adam's kernel rounds 1 - β₂.
TOLERANCES = {"float64": 1e-13, "float32": 2e-5, "float16": 2e-3, "bfloat16": 2e-2}


SCHEDULE = keras.optimizers.schedules.ExponentialDecay(0.02, 10, 0.9)

CASES = [
    ("SGD", {}),
    ("SGD", {"momentum": 0.9}),
    ("SGD", {"momentum": 0.9, "nesterov": True}),
    ("SGD", {"momentum": 0.9, "weight_decay": 0.02}),
    ("SGD", {"weight_decay": 0.02, "learning_rate": SCHEDULE}),
    ("Adam", {}),
    ("Adam", {"amsgrad": True}),
    ("Adam", {"beta_1": 0.5, "beta_2": 0.9, "epsilon": 1e-3, "learning_rate": SCHEDULE}),
    ("AdamW", {}),
    ("AdamW", {"weight_decay": 0.1, "learning_rate": SCHEDULE}),
    ("RMSprop", {}),
    ("RMSprop", {"momentum": 0.9, "rho": 0.8}),
    ("RMSprop", {"centered": True, "epsilon": 1e-3}),
    ("RMSprop", {"centered": True, "momentum": 0.9, "epsilon": 1e-3, "learning_rate": SCHEDULE}),
    ("Adagrad", {"weight_decay": 0.1}),
    ("Adagrad", {"initial_accumulator_value": 0.0, "epsilon": 1e-2}),
]
# One of each optimizer: for other precisions than float64, and for sparse gradients.
FEW_CASES = [
    ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.02}),
    ("AdamW", {"weight_decay": 0.1}),
    ("RMSprop", {"momentum": 0.9}),
    ("Adagrad", {}),
]


def both(name):
    return getattr(keras.optimizers, name), getattr(optimizers, f"Fused{name}")


def variables(dtype="float32"):
    random = np.random.default_rng(0)
    return [
        keras.Variable(random.normal(size=shape), dtype=dtype, name=f"v{index}")
        for index, shape in enumerate(SHAPES)
    ]


def exact(optimizer):
    """Keeps Keras from rounding its hyperparameters to float32 in float64 runs."""
    for name in ("beta_1", "beta_2", "momentum", "weight_decay"):
        if isinstance(getattr(optimizer, name, None), float):
            setattr(optimizer, name, np.float64(getattr(optimizer, name)))


def trained(strategy, optimizer_class, arguments, dtype="float32", sparse=False, steps=100):
    """The variables and slots after updates by gradients drawn from a fixed stream."""
    with strategy.scope():
        weights = variables(dtype)
        optimizer = optimizer_class(**{"learning_rate": 0.01} | arguments)
        if dtype == "float64" and not isinstance(optimizer, fused.Fused):
            exact(optimizer)
        if optimizer.weight_decay is not None:
            optimizer.exclude_from_weight_decay(var_names=["v1"])
    prepare_optimizer(optimizer, weights, strategy)

    def gradients(step):
        dense = [
            tf.cast(tf.random.stateless_normal(w.shape, [index, step]), dtype)
            for index, w in enumerate(weights)
        ]
        if sparse:
            rows = tf.random.stateless_uniform([40], [9, step]) < 0.2
            indices = tf.reshape(tf.where(rows), [-1])
            dense[0] = tf.IndexedSlices(
                tf.gather(dense[0], indices), indices, tf.constant([40, 3], tf.int64)
            )
        return dense

    @tf.function(autograph=False)
    def update(step):
        strategy.run(lambda step: optimizer.apply(gradients(step), weights), args=(step,))

    for step in range(steps):
        update(tf.constant(step))
    graph = update.get_concrete_function(tf.constant(0)).graph
    kernels = sum("ResourceApply" in operation.type for operation in graph.get_operations())
    return [v.numpy().astype("f8") for v in (*weights, *optimizer.variables)], kernels


def assert_equal(got, expected, dtype):
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


@pytest.mark.parametrize(
    ("dtype", "name", "arguments", "sparse"),
    [
        *(("float64", *case, False) for case in CASES),
        *(("float64", *case, True) for case in FEW_CASES),
        *(("float32", *case, sparse) for case in FEW_CASES for sparse in (False, True)),
        *((dtype, *case, False) for dtype in ("float16", "bfloat16") for case in FEW_CASES),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else str(value),
)
def test_equals_keras_over_100_updates(dtype, name, arguments, sparse):
    strategy = make_strategy("one_device", 1)
    of_keras, ours = (
        trained(strategy, optimizer, arguments, dtype, sparse) for optimizer in both(name)
    )
    assert_equal(ours[0], of_keras[0], dtype)


@for_each_kind_on_two
@pytest.mark.parametrize("name", NAMES)
def test_equals_keras_on_every_strategy(strategy, name):
    arguments = {"weight_decay": 0.1} | ({"momentum": 0.9} if name == "SGD" else {})
    of_keras, ours = (
        trained(strategy, optimizer, arguments, "float64", steps=5) for optimizer in both(name)
    )
    assert_equal(ours[0], of_keras[0], "float64")
    copies = strategy.num_replicas_in_sync
    if isinstance(strategy, tf.distribute.experimental.CentralStorageStrategy):
        copies = 1
    decays = len(SHAPES) - 1
    assert ours[1] == copies * (len(SHAPES) + decays)
    assert of_keras[1] == 0


@pytest.mark.parametrize("name", NAMES)
def test_constructor_and_config_are_those_of_keras(name):
    of_keras, ours = both(name)
    assert inspect.signature(ours) == inspect.signature(of_keras)
    config = ours(0.25).get_config()
    keras.backend.clear_session()  # which counts names anew
    assert config == of_keras(0.25).get_config()
    assert ours.from_config(config).get_config() == config
    assert ours(0.25, name="other").name == "other"
    again = keras.optimizers.deserialize(keras.optimizers.serialize(ours(0.25)))
    assert isinstance(again, ours)


@pytest.mark.parametrize("name", NAMES)
def test_variables_are_those_of_keras(name):
    of_keras, ours = both(name)
    keras.backend.clear_session()
    first, second = of_keras(0.1), ours(0.1)
    for optimizer in (first, second):
        optimizer.build(variables())
    assert [v.path for v in second.variables] == [v.path for v in first.variables]


@pytest.mark.parametrize("name", NAMES)
def test_checkpoints_are_those_of_keras(tmp_path, name):
    of_keras, ours = both(name)
    for number, (writer, reader) in enumerate([(of_keras, ours), (ours, of_keras)]):
        weights = variables()
        written, read = writer(0.1), reader(0.1)
        for optimizer in (written, read):
            optimizer.build(weights)
        written.apply([tf.ones(w.shape) for w in weights], weights)
        path = tf.train.Checkpoint(optimizer=written).write(str(tmp_path / str(number)))
        status = tf.train.Checkpoint(optimizer=read).read(path)
        status.assert_consumed()
        for one, other in zip(written.variables, read.variables, strict=True):
            np.testing.assert_array_equal(one.numpy(), other.numpy())


def test_rows_given_twice_are_added_up():
    results = []
    for twice in (False, True):
        weight = keras.Variable(np.ones((4, 2), "f4"))
        optimizer = optimizers.FusedAdam(0.1)
        optimizer.build([weight])
        values, indices = ([[1.0, 1.0]] * 2, [2, 2]) if twice else ([[2.0, 2.0]], [2])
        gradient = tf.IndexedSlices(tf.constant(values), tf.constant(indices), [4, 2])
        optimizer.apply([gradient], [weight])
        results.append([v.numpy() for v in (weight, *optimizer.variables)])
    for once, twice in zip(*results, strict=True):
        np.testing.assert_array_equal(once, twice)


def test_says_once_where_keras_computes(monkeypatch):
    notes = []
    monkeypatch.setattr(fused.logging, "info", lambda text, *values: notes.append(text % values))
    fused._note_once.cache_clear()
    strategy = make_strategy("one_device", 1)
    _, kernels = trained(strategy, optimizers.FusedAdam, {}, "float16", steps=2)
    assert kernels == 0
    assert len(notes) == 1
    assert "FusedAdam" in notes[0]
    assert "float16" in notes[0]


def test_updates_at_the_same_time_have_temporary_variables_of_their_own():
    @tf.function(autograph=False)
    def added(value):
        with fused.temporary(value) as handle:
            tf.raw_ops.AssignAddVariableOp(resource=handle, value=value)
            return tf.raw_ops.ReadVariableOp(resource=handle, dtype=value.dtype)

    values = [tf.fill([100_000], float(number)) for number in range(1, 5)]
    added.get_concrete_function(values[0])
    with ThreadPoolExecutor(len(values)) as workers:
        for _ in range(50):
            for value, found in zip(values, workers.map(added, values), strict=True):
                np.testing.assert_array_equal(found, value)


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize(
    "make", [lambda: optimizers.FusedRMSprop(0.1), lambda: optimizers.LAMB(0.1)]
)
def test_the_shape_of_a_sparse_gradient_may_be_a_tensor(make, packs, monkeypatch):
    """As within tf.cond, where an update waits for the check for overflow."""
    if packs:
        as_on_gpus(monkeypatch)
    variable = keras.Variable(np.ones([4, 2], "float32"), dtype="float32")
    optimizer = make()
    optimizer.build([variable])

    @tf.function(autograph=False)
    def update(shape):
        gradient = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([1]), shape)
        optimizer.apply([gradient], [variable])

    update.get_concrete_function(tf.TensorSpec([2], tf.int64))(tf.constant([4, 2], tf.int64))
    assert np.all(variable.numpy()[1] < 1)
