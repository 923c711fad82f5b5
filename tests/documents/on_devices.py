"""Runs a script whose `MirroredStrategy()` has a number of CPU devices.

python -m tests.documents.on_devices NUMBER SCRIPT; a script with a trainer shows its replicas.
"""

import runpy
import sys

import tensorflow as tf


class MirroredStrategy(tf.distribute.MirroredStrategy):
    """On all CPU devices, where TensorFlow's own takes one."""

    def __init__(self):
        devices = [f"CPU:{n}" for n in range(len(tf.config.list_logical_devices("CPU")))]
        super().__init__(devices, cross_device_ops=tf.distribute.ReductionToOneDevice())


if __name__ == "__main__":
    number, script = sys.argv[1:]
    (processor,) = tf.config.list_physical_devices("CPU")
    one = tf.config.LogicalDeviceConfiguration()
    tf.config.set_logical_device_configuration(processor, [one] * int(number))
    tf.distribute.MirroredStrategy = MirroredStrategy
    names = runpy.run_path(script)
    if "trainer" in names:
        print("replicas", names["trainer"].strategy.num_replicas_in_sync)
