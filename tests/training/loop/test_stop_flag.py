import threading

import tensorflow as tf

from ddl.distribution.workers import Workers
from ddl.training.loop.stop_flag import StopFlag
from tests.conftest import for_every_strategy


@for_every_strategy
def test_a_thread_raises_what_a_loop_reads(strategy):
    workers = Workers(strategy)
    with strategy.scope():
        flag, other = StopFlag(workers), StopFlag(workers)

    @tf.function(autograph=False)
    def loop(turns):
        return tf.while_loop(
            lambda turn: (turn < turns) & ~flag.ends_loop(),
            lambda turn: turn + 1,
            (tf.constant(0),),
        )[0]

    assert loop(tf.constant(5)) == 5
    timer = threading.Timer(0.3, flag.request)
    timer.start()
    assert 0 < loop(tf.constant(2**30)) < 2**30
    timer.join()
    assert flag.take()
    assert not flag.take()
    assert not other.take()
    assert loop(tf.constant(5)) == 5
