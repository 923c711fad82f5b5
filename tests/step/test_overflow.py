import numpy as np
import pytest
import tensorflow as tf

from ddl.precision import LossScale
from ddl.step.overflow import change_unless_overflow, each_finite, next_scale
from ddl.step.state import TrainingState


def rows(values):
    return tf.IndexedSlices(tf.constant(values), tf.constant([0]), tf.constant([4, 2]))


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_each_gradient_is_looked_at_sparse_ones_too(bad):
    gradients = [tf.ones([3]), tf.constant([1.0, bad]), rows([[1.0, 2.0]]), rows([[1.0, bad]])]
    assert each_finite(gradients).numpy().tolist() == [True, False, True, False]


@pytest.mark.parametrize(
    ("finite", "norm", "calls"), [(True, 3.0, ["change"]), (False, 0.0, ["undo"])]
)
def test_an_overflow_undoes_instead_of_changing(finite, norm, calls):
    called = []

    def change():
        called.append("change")
        return tf.constant(3.0, tf.float64)

    here, asked = tf.distribute.get_strategy(), tf.constant(finite)
    found = change_unless_overflow(here, asked, change, lambda: called.append("undo"))
    assert (float(found), called) == (norm, calls)


def test_skips_are_counted_until_an_update_is_made():
    state = TrainingState.initial(8.0, tf.zeros([2], tf.float64))
    for finite, scale, skipped in ((False, 4, 1), (False, 2, 2), (True, 2, 0), (True, 4, 0)):
        fields = next_scale(LossScale(8.0, growth_interval=2), state, tf.constant(finite))
        assert (float(fields["loss_scale"]), int(fields["skipped_in_a_row"])) == (scale, skipped)
        state = state._replace(**fields)
