import math

import numpy as np
import pytest
import tensorflow as tf

from ddl.precision import LossScale
from ddl.step.overflow import Changes, change_unless_overflow, each_finite
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


@pytest.mark.parametrize("by_branch", [False, True])
def test_skips_are_counted_until_an_update_is_made(by_branch):
    rule = LossScale(8.0, growth_interval=2)

    @tf.function(autograph=False)
    def next_fields(state, finite):
        new, norms = tf.constant([1.0, math.inf], tf.float64), tf.constant([2.0, 1], tf.float64)
        if by_branch:  # the norms of a skipped update are never asked for
            return Changes(new, lambda _: norms).by_branch(state, finite, rule)
        changes = Changes(new, lambda made: norms * tf.cast(made, tf.float64))
        return changes.by_selection(state, finite, rule)

    state = TrainingState.initial(8.0, tf.zeros([2], tf.float64))
    cases = ((False, 4, 1), (False, 2, 2), (True, 2, 0), (True, 4, 0), (True, 4, 0), (False, 2, 1))
    for turn, (finite, scale, skipped) in enumerate(cases):
        state = state._replace(**next_fields(state, tf.constant(finite)))
        assert (float(state.loss_scale), int(state.skipped_in_a_row)) == (scale, skipped)
        made = sum(one for one, _, _ in cases[: turn + 1])
        assert int(state.step) == made
        np.testing.assert_array_equal(state.sums, [made, math.inf if made else 0])
        np.testing.assert_array_equal(state.gradient_norms, [2 * made, made])
    assert int(state.finite_updates) == 0


def test_a_branch_keeps_the_scale_within_its_limits():
    state = TrainingState.initial(2.0**24, tf.zeros([1], tf.float64))
    for rule, finite, expected in (
        (LossScale(2.0**24, growth_interval=1), True, 2.0**24),
        (LossScale(1.0, growth_interval=None), False, 2.0**24),
    ):
        for method in ("by_branch", "by_selection"):
            changes = Changes(state.sums, None)
            fields = getattr(changes, method)(state, tf.constant(finite), rule)
            assert float(fields["loss_scale"]) == expected
    low = state._replace(loss_scale=tf.constant(1.0))
    fields = Changes(state.sums, None).by_branch(low, tf.constant(False), LossScale())
    assert float(fields["loss_scale"]) == 1
