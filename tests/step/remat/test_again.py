"""The gradient from a second computation: the same numbers, and nothing happens twice."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from ddl.errors import ConfigError
from ddl.microbatch import Microbatch
from ddl.random import batch_counter
from ddl.step.remat.again import computed_again
from tests.conftest import EachDrawByRow

ROWS = 4


def current():
    return Microbatch(
        seed=1,
        training=True,
        counter=batch_counter(tf.zeros([], tf.int64)),
        first_row=0,
        rows=ROWS,
        placing=EachDrawByRow(),
    )


def gradients(layer, function=None, again=True, of=None):
    """The gradients of a layer's inputs and weights, with the operations of the graph."""
    x = tf.constant(np.random.default_rng(0).normal(size=(ROWS, 3)), tf.float32)
    function = function or (lambda x: layer(x, training=True))
    if not layer.built:
        layer.build((ROWS, 3))
    graphs = []

    @tf.function(autograph=False)
    def run(x):
        microbatch = current()
        with tf.GradientTape() as tape, microbatch.forward():
            tape.watch(x)
            y = computed_again("part", function, x, layer.variables) if again else function(x)
            losses = [tf.reduce_sum(tf.sin(one)) for one in keras.tree.flatten(y)]
            loss = tf.add_n([*losses, *layer.losses])
        with microbatch.backward():
            found = tape.gradient(loss, [x, *(of or [v.value for v in layer.trainable_variables])])
        graphs.append(tf.compat.v1.get_default_graph())
        return [loss, *map(tf.convert_to_tensor, found)]

    return [value.numpy() for value in run(x)], graphs[0]


def check_same(layer, function=None, of=None, tolerance=0.0):
    if not layer.built:
        layer.build((ROWS, 3))
    before = [v.numpy() for v in layer.variables]
    plain, _ = gradients(layer, function, again=False, of=of)
    once = [v.numpy() for v in layer.variables]
    for variable, value in zip(layer.variables, before, strict=True):
        variable.assign(value)
    repeated, graph = gradients(layer, function, of=of)
    assert [op for op in graph.get_operations() if "again_remat_part" in op.name]
    for ours, theirs in zip(repeated, plain, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=tolerance)
    for variable, value in zip(layer.variables, once, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)  # moved once


class Custom(keras.layers.Layer):
    """A layer with one weight and one variable that is not trained."""

    def __init__(self, computed, **arguments):
        super().__init__(**arguments)
        self._computed = computed

    def build(self, shape):
        self.weight = self.add_weight(shape=(3,), initializer="ones", name="weight")
        self.mean = self.add_weight(
            shape=(3,), initializer="ones", trainable=False, name="mean", dtype="float32"
        )

    def call(self, x):
        return self._computed(self, x)


def test_draws_are_those_of_the_forward_pass():
    one = keras.layers.Dropout(0.5)
    layer = keras.Sequential([keras.layers.Dense(5), one, keras.layers.Dropout(0.5, seed=1), one])
    layer.build((ROWS, 3))
    check_same(layer)


def test_an_unnamed_draw_of_keras_repeats_itself():
    check_same(Custom(lambda layer, x: x * layer.weight * keras.random.uniform((ROWS, 3))))


def test_moving_moments_move_once():
    layer = keras.Sequential([keras.layers.Dense(5), keras.layers.BatchNormalization()])
    layer.build((ROWS, 3))
    check_same(layer)


def test_a_value_that_the_forward_pass_changed_is_the_earlier_one():
    def computed(layer, x):
        y = x * layer.weight - layer.mean * x**2  # reads the value before
        layer.mean.assign(layer.mean * 3)
        return y

    check_same(Custom(computed))


def test_an_assigned_value_has_no_gradient():
    def computed(layer, x):
        layer.mean.assign(0.5 * layer.mean + tf.reduce_mean(x * layer.weight, axis=0))
        return x * layer.weight - layer.mean * x  # a constant here, as without

    check_same(Custom(computed))


def test_a_loss_of_an_inner_layer_keeps_its_gradient():
    keras.utils.set_random_seed(0)  # sums of opposite numbers lose digits with some weights
    layer = keras.Sequential(
        [keras.layers.Dense(5, activity_regularizer="l2"), keras.layers.Dense(2)]
    )
    layer.build((ROWS, 3))
    check_same(layer, tolerance=1e-5)  # two sums in another order


def test_a_tensor_that_is_no_argument_keeps_its_gradient():
    outside = tf.Variable([1.0, 2.0, 3.0])

    class Reader(keras.layers.Layer):
        def call(self, x):
            return x * self.given

    layer = Reader()

    def function(x):
        return layer(x)

    def run(again):
        @tf.function(autograph=False)
        def compute(x):
            microbatch = current()
            with tf.GradientTape() as tape, microbatch.forward():
                layer.given = tf.exp(outside)
                y = computed_again("part", function, x, []) if again else function(x)
                loss = tf.reduce_sum(tf.sin(y))
            with microbatch.backward():
                return tape.gradient(loss, outside)

        return compute(tf.ones([ROWS, 3])).numpy()

    assert np.all(run(False) != 0)
    np.testing.assert_array_equal(run(True), run(False))


def test_in_a_branch_a_tensor_that_is_no_argument_is_refused():
    """The branch's backward pass, a graph of its own, would lose the gradient in silence."""
    given = {}

    def function(x):
        return x * given["scale"]

    def branch(x):
        given["scale"] = tf.reduce_mean(x)
        return tf.cond(
            tf.reduce_sum(x) > 0, lambda: computed_again("part", function, x, []), lambda: x
        )

    layer = keras.layers.Dense(3)
    with pytest.raises(ConfigError, match="'part' must take all tensors as arguments"):
        gradients(layer, branch)


def test_a_variable_of_tensorflow_has_its_gradient():
    raw = tf.Variable([1.0, 2.0, 3.0])
    layer = Custom(lambda layer, x: x * layer.weight * raw)
    layer.build((ROWS, 3))
    check_same(layer, of=[layer.weight.value, raw])


def test_a_variable_of_tensorflow_that_is_assigned_later_is_refused():
    """Read again, it would have another value."""
    layer = Custom(lambda layer, x: x * layer.weight * COUNT)

    def then(change):
        def function(x):
            y = computed_again("inner", layer, x, layer.variables)
            change(y)
            return y

        return function

    gradients(layer, then(lambda _: COUNT + 1.0), again=False)
    for change in (
        lambda _: COUNT.assign_add(1.0),
        lambda y: tf.function(lambda: COUNT.assign_add(y[0, 0]), autograph=False)(),
    ):
        with pytest.raises(ConfigError, match="'inner' reads a variable that is assigned later"):
            gradients(layer, then(change), again=False)


def test_masks_pass_through():
    layer = keras.Sequential([keras.layers.Masking(0.0), keras.layers.SimpleRNN(2)])
    layer.build((ROWS, 3, 1))
    first = layer.layers[0]
    check_same(layer, lambda x: layer.layers[1](first(x[..., None])))


def test_the_second_computation_waits_for_the_gradients_of_the_outputs():
    _, graph = gradients(keras.layers.Dense(5, activation="tanh"))
    repeated = [op for op in graph.get_operations() if "again_remat_part" in op.name]
    (product,) = [op for op in repeated if op.type == "MatMul" and "gradient" not in op.name][:1]
    tied = product.inputs[0].op
    assert tied.type == "Identity"
    assert tied.control_inputs


def spectral():
    layer = keras.layers.SpectralNormalization(keras.layers.Dense(2))
    layer.build((ROWS, 3))
    return layer


COUNT = tf.Variable(0.0, trainable=False)


def counting(layer, x):
    COUNT.assign_add(1.0)
    return x * layer.weight


def twice(function, x):
    # Not tf.map_fn, which leaves settings of TensorFlow changed after an error.
    return tf.while_loop(lambda n, _: n < 2, lambda n, x: (n + 1, function(x)), (0, x))[1]


class InLoop(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.dropout = keras.layers.Dropout(0.5, seed=1)

    def call(self, x, training=False):
        return twice(lambda x: self.dropout(x, training=training), x)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (spectral, "'part' assigns to its trainable weight .*kernel"),
        (lambda: Custom(counting), "got the operation AssignAddVariableOp"),
        (lambda: Custom(lambda layer, x: x * layer.weight + tf.random.normal([ROWS, 3])), "Random"),
        (
            lambda: Custom(
                lambda layer, x: tf.function(counting, autograph=False)(layer, x), name="inner"
            ),
            "got the operation AssignAddVariableOp",
        ),
        (InLoop, "draws random numbers in a loop"),
        (lambda: Custom(lambda layer, x: tf.sparse.from_dense(x * layer.weight)), "SparseTensor"),
    ],
)
def test_what_cannot_be_repeated_is_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        gradients(make())


def test_other_results_of_the_second_computation_are_refused():
    shapes = iter([1, 2])

    def computed(layer, x):
        return [x * layer.weight] * next(shapes)

    with pytest.raises(ConfigError, match="must compute the same"):
        gradients(Custom(computed))


def test_a_layer_within_a_loop_is_refused():
    layer = keras.layers.Dense(3)
    layer.build((ROWS, 3))

    def computed(x):
        return twice(lambda x: computed_again("inner", layer, x, layer.variables), x)

    with pytest.raises(ConfigError, match="'inner' is called within a loop"):
        gradients(layer, computed)
