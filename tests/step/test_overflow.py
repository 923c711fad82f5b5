import numpy as np
import pytest
import tensorflow as tf

from ddl.step.overflow import all_finite, unless_overflow


def rows(values):
    return tf.IndexedSlices(tf.constant(values), tf.constant([0]), tf.constant([4, 2]))


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_each_gradient_is_looked_at_sparse_ones_too(bad):
    gradients = [tf.ones([3]), tf.constant([1.0, bad]), rows([[1.0, 2.0]]), rows([[1.0, bad]])]
    assert all_finite(gradients).numpy().tolist() == [True, False, True, False]


@pytest.mark.parametrize(
    ("finite", "norm", "calls"), [(True, 3.0, ["change"]), (False, 0.0, ["undo"])]
)
def test_an_overflow_undoes_instead_of_changing(finite, norm, calls):
    called = []

    def change():
        called.append("change")
        return tf.constant(3.0, tf.float64)

    here, asked = tf.distribute.get_strategy(), tf.constant(finite)
    found = unless_overflow(here, asked, change, lambda: called.append("undo"))
    assert (float(found), called) == (norm, calls)
