import threading

import tensorflow as tf

from ddl.stop_flag import StopFlag


def test_a_thread_raises_what_a_loop_reads(strategy):
    with strategy.scope():
        flag, other = StopFlag(), StopFlag()

    @tf.function(autograph=False)
    def loop(turns):
        return tf.while_loop(
            lambda turn: (turn < turns) & ~flag.read(), lambda turn: turn + 1, (tf.constant(0),)
        )[0]

    assert loop(tf.constant(5)) == 5
    timer = threading.Timer(0.3, flag.set, (True,))
    timer.start()
    assert 0 < loop(tf.constant(2**30)) < 2**30
    timer.join()
    assert flag.read().numpy()
    assert not other.read().numpy()
    flag.set(False)
    assert loop(tf.constant(5)) == 5
