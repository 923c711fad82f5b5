"""A sum has the same bits whether other readers of its terms ran before it or after."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.ops import gen_math_ops

from ddl.step.sums import fixed_order_of_sums

_TERMS = [np.random.default_rng(term).normal(size=(64, 64)).astype("f4") for term in range(5)]


def plus(terms):
    first, *others = terms
    for other in others:
        first = first + other
    return first


def gradient_of_many_uses(terms):
    x = tf.zeros_like(terms[0])
    with tf.GradientTape() as tape:
        tape.watch(x)
        uses = [tf.identity(x) for _ in terms]
    return tape.gradient(uses, x, output_gradients=terms)


def reduced(terms):
    """As tf.distribute does between devices."""
    return tf.distribute.ReductionToOneDevice().accumulation_fn(terms)


SUMS = {
    "add_n": tf.add_n,
    "plus": plus,
    "Keras": lambda terms: keras.layers.Add()(terms),
    "gradient": gradient_of_many_uses,
    "tf.distribute": reduced,
}


def bits(add, reader_first):
    """Of a sum of five terms, of which all but the last are also read elsewhere."""
    variables = [tf.Variable(term) for term in _TERMS]

    def read(terms):
        return [tf.reduce_sum(tf.square(term)) for term in terms[:-1]]

    @tf.function(autograph=False)
    def run():
        terms = [tf.sin(variable) for variable in variables]
        if reader_first:
            others = read(terms)
            with tf.control_dependencies(others):
                return add(terms), others
        total = add(terms)
        with tf.control_dependencies([total]):
            return total, read(terms)

    return run()[0].numpy().tobytes()


@pytest.mark.parametrize("add", SUMS.values(), ids=SUMS)
def test_the_order_is_fixed(add):
    with fixed_order_of_sums():
        assert bits(add, reader_first=True) == bits(add, reader_first=False)


@pytest.mark.parametrize("add", SUMS.values(), ids=SUMS)
def test_tensorflow_has_no_fixed_order(add):
    """Else `fixed_order_of_sums` would not be needed any more."""
    assert bits(add, reader_first=True) != bits(add, reader_first=False)


def test_what_add_n_refuses_is_refused():
    @tf.function(autograph=False)
    def run(x, y):
        return tf.add_n([x, x, y])

    with fixed_order_of_sums(), pytest.raises(ValueError, match="shape"):
        run(tf.zeros([3, 1]), tf.zeros([3]))


def test_tensorflow_is_left_as_it_was():
    plain = gen_math_ops.add_v2, gen_math_ops.add_n
    with fixed_order_of_sums():
        with fixed_order_of_sums():
            pass
        assert gen_math_ops.add_n is not plain[1]
    assert (gen_math_ops.add_v2, gen_math_ops.add_n) == plain
