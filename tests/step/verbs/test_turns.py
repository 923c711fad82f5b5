"""The turns of nested repeats: each has random numbers of its own."""

import pytest
import tensorflow as tf

from ddl.step.verbs.turns import Turns


@pytest.mark.parametrize(
    ("outer", "inner", "message"),
    [
        (4094, 4096, None),
        (0, 4097, "within another one can have at most 4,096 turns.*Got:. .4097"),
        (4095, 1, "around another one can have at most 4,095 turns.*Got:. .4096"),
    ],
)
def test_too_many_turns_of_a_tensor_end_the_run(outer, inner, message):
    """They are known when the step runs. Each message names the remedy."""

    @tf.function
    def within(turn, times):
        around = Turns().in_turn(turn, tf.cast(turn + 1, tf.int64))
        count = around.check_repeat(times)
        return around.in_turn(count - 1, count).number

    given = tf.constant(outer, tf.int64), tf.constant(inner)
    if message is None:
        assert int(within(*given)) == (4094 + 1) * 4096 + 4095 < 2**24
        return
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        within(*given)
