"""Kernels of runs with batch_shards: kept between calls, as TensorFlow reads it at the first."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import tensorflow as tf
from ddl.distribution.arithmetic import fix_arithmetic

fix_arithmetic()
images = tf.random.stateless_normal([8, 8, 8, 3], [0, 0])
kernel = tf.Variable(tf.random.stateless_normal([3, 3, 3, 16], [0, 1]))

@tf.function(autograph=False)
def gradient():
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.nn.conv2d(images, kernel, 1, "SAME") ** 2)
    return tape.gradient(loss, kernel)

for _ in range(20):
    gradient()
"""


@pytest.mark.parametrize("given", ["", "true"])
def test_onednn_kernels_are_made_once(given):
    """With the user's own setting they are made in each call."""
    environment = {**os.environ, "ONEDNN_VERBOSE": "2", "TF_NUM_INTRAOP_THREADS": "1"}
    environment.pop("TF_MKL_OPTIMIZE_PRIMITIVE_MEMUSE", None)
    if given:
        environment["TF_MKL_OPTIMIZE_PRIMITIVE_MEMUSE"] = given
    program = [sys.executable, "-c", PROGRAM]
    run = subprocess.run(program, env=environment, capture_output=True, text=True, check=True)
    lines = [line for line in run.stdout.splitlines() if "backward_weights" in line]
    if not any("exec" in line for line in lines):
        pytest.skip("TensorFlow computes convolutions without oneDNN here")
    made = sum("create" in line for line in lines)
    assert made <= 2 if not given else made >= 20
