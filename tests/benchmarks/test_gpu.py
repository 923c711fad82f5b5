"""The benchmarks of GPUs, tried on a CPU: counting and profiles."""

import keras
import pytest
import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2

import ddl
from benchmarks import gpu, gpu_counts
from benchmarks.gpu_counts import HOST, Row


def test_operations_of_an_update_are_counted_without_a_gpu():
    update = gpu_counts.update_of(Row("MLP"))
    bare = gpu_counts.bare_update_of(Row("MLP"))
    assert update.library_calls == bare.library_calls == 5  # matrix products
    assert 20 < bare.operations < update.operations <= gpu_counts.WORSE * bare.operations
    assert (update.crossing, update.on_host) == (0, [])


@pytest.mark.parametrize("name", ["mixed_float16", "data made on the host", "mirrored on 2"])
def test_an_update_leaves_nothing_to_the_host(name):
    (row,) = (row for row in gpu_counts.ROWS if str(row) == f"MLP: {name}")
    update = gpu_counts.update_of(row)
    assert update.crossing <= 32
    assert not update.on_host


class CountsOnTheHost(ddl.Classification):
    """A task with a metric in int32, and losses, which are computed on the host."""

    def per_example(self, features, training):
        output = super().per_example(features, training)
        positive = tf.cast(features["image"] > 0, tf.int32)
        metrics = {"positive": tf.cast(tf.reduce_sum(positive, [1, 2, 3]), "float32")}
        with tf.device(HOST):
            return output._replace(loss=output.loss * 2, metrics=metrics)


def test_operations_on_the_host_and_copies_are_found(monkeypatch):
    monkeypatch.setattr(ddl, "Classification", CountsOnTheHost, raising=False)
    own = type("Own", (keras.optimizers.Adam,), {})  # by Keras's own operations
    monkeypatch.setattr(keras.optimizers, "Adam", own)
    update = gpu_counts.update_of(Row("MLP"))
    assert any("Sum: input, int32(64, 28, 28, 1), is in host" in line for line in update.on_host)
    assert update.crossing >= 2 * 64 * 4  # losses forward, gradients backward
    assert update.operations > 60


def test_idle_time_and_kernels_of_a_profile():
    space = xplane_pb2.XSpace()
    space.planes.add(name="/host:CPU").lines.add(name="Stream of words").events.add()
    plane = space.planes.add(name="/device:GPU:0")
    for number, name in enumerate(["gemm", "MemcpyH2D", "summary"]):
        plane.event_metadata[number].name = name
    events = {"Stream #13": [(0, 0, 2), (0, 5, 1)], "Stream #14": [(0, 1, 2), (1, 9, 1)]}
    for name, of_line in (events | {"XLA Modules": [(2, 0, 10)]}).items():
        line = plane.lines.add(name=name, timestamp_ns=10_000)
        for kind, start, length in of_line:
            microseconds = {"offset_ps": start * 10**6, "duration_ps": length * 10**6}
            line.events.add(metadata_id=kind, **microseconds)
    idle, kernels = gpu.read([space.SerializeToString()])
    assert idle == pytest.approx(5e-6)  # from 3 to 5, and from 6 to 9
    assert kernels == 3
