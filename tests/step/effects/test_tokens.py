"""The variable that orders collective operations is none that a loss writes."""

import pytest
import tensorflow as tf

from ddl.step.effects.written import written_in


def directly(reduce):
    return reduce()


def in_a_function(reduce):
    return tf.function(reduce)()


def in_a_branch(reduce):
    return tf.cond(tf.random.uniform([]) < 0.5, reduce, lambda: tf.zeros([2]))


def in_a_loop(reduce):
    return tf.while_loop(lambda i, _: i < 2, lambda i, _: (i + 1, reduce()), (0, tf.zeros([2])))[1]


PLACES = [directly, in_a_function, in_a_branch, in_a_loop]


def traced(place, token, also=lambda: None):
    """The graph of a reduction that the token orders, not run."""

    def reduce():
        also()
        reduced = tf.raw_ops.CollectiveReduceV2(
            input=tf.ones([2]),
            group_size=2,
            group_key=1,
            instance_key=1,
            ordering_token=[token.handle],
            merge_op="Add",
            final_op="Id",
        )
        return tf.ensure_shape(reduced, [2])

    return tf.function(lambda: place(reduce)).get_concrete_function().graph


@pytest.mark.parametrize("place", PLACES)
def test_a_token_is_not_written(place):
    token = tf.Variable(0.0)
    assert written_in(traced(place, token), [token]) == []


def test_a_write_behind_an_identity_counts():
    variable = tf.Variable(0.0)

    def write():
        handle = tf.identity(variable.handle)
        tf.raw_ops.AssignAddVariableOp(resource=handle, value=1.0)

    assert written_in(tf.function(write).get_concrete_function().graph, [variable]) == [variable]


@pytest.mark.parametrize("place", PLACES)
def test_a_variable_that_also_orders_collectives_is(place):
    token = tf.Variable(0.0)
    assert written_in(traced(place, token, lambda: token.assign_add(1.0)), [token]) == [token]
