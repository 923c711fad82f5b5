"""Start-up notes for runs on GPUs, with a strategy that says it has one."""

import subprocess
import sys
import types

import keras
import pytest
import tensorflow as tf
from ddl.run.checks.gpu_notes import gpu_notes

from ddl import precision
from ddl.cli.placing import choose_tf32
from ddl.precision import set_precision, set_tf32
from ddl.training.checks import warn_of_tf32
from tests.conftest import make_strategy

GPU = types.SimpleNamespace(
    extended=types.SimpleNamespace(worker_devices=("/job:localhost/replica:0/task:0/device:GPU:0",))
)


@pytest.fixture(autouse=True)
def _tf32_as_before(monkeypatch):
    before = tf.config.experimental.tensor_float_32_execution_enabled()
    monkeypatch.setattr(precision, "_chosen", set())
    yield
    tf.config.experimental.enable_tensor_float_32_execution(before)


def layers_of_convolutions():
    return [
        keras.layers.Conv2D(16, 3, name="wide"),
        keras.layers.Conv2D(6, 3, name="narrow"),
        keras.layers.Flatten(),
        keras.layers.Dense(10, name="classes"),
        keras.layers.Dense(10, name="logits", dtype="float32"),
    ]


def test_float32_says_whether_it_is_rounded():
    set_precision("float32")
    set_tf32(False)
    off, repetition = gpu_notes(GPU, layers_of_convolutions())
    assert off.startswith("TF32 is off:")
    assert "--tf32=on" in off
    assert "--deterministic_ops" in repetition
    assert "not bit for bit" in repetition
    set_tf32(True)
    on, _ = gpu_notes(GPU, layers_of_convolutions())
    assert on.startswith("TF32 is on:")
    set_precision("float64")
    assert gpu_notes(GPU, layers_of_convolutions()) == [repetition]
    assert gpu_notes(make_strategy("one_device", 1), layers_of_convolutions()) == []


@pytest.mark.parametrize(("devices", "after"), [([], True), (["GPU:0"], False)])
def test_the_flag_acts_where_a_gpu_is_visible(monkeypatch, devices, after):
    tf.config.experimental.enable_tensor_float_32_execution(True)
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: devices)
    choose_tf32(False)
    assert tf.config.experimental.tensor_float_32_execution_enabled() == after


def test_layers_that_miss_tensor_cores_are_named_once():
    set_tf32(False)
    set_precision("mixed_bfloat16")
    _, note = gpu_notes(GPU, layers_of_convolutions() * 2)
    assert note.endswith("multiples of 8; slower layers: narrow (6), classes (10).")
    many = [keras.layers.Dense(3) for _ in range(9)]
    _, note = gpu_notes(GPU, many)
    assert note.endswith(f"{many[4].name} (3) and 4 more.")


def test_a_trainer_warns_of_tf32_that_nobody_chose(caplog):
    set_precision("float32")
    tf.config.experimental.enable_tensor_float_32_execution(True)
    warn_of_tf32(make_strategy("one_device", 1))
    assert not caplog.messages
    warn_of_tf32(GPU)
    (told,) = caplog.messages
    assert "ddl.precision.set_tf32(False)" in told
    set_tf32(True)
    warn_of_tf32(GPU)
    assert len(caplog.messages) == 1


def test_with_deterministic_operations_a_run_repeats():
    code = """
import tensorflow as tf
from tests.run.checks.test_gpu_notes import GPU
from ddl.distribution.devices import configure_devices
from ddl.run.checks.gpu_notes import gpu_notes
configure_devices(deterministic_ops=True)
print(*gpu_notes(GPU, []), sep="\\n")
"""
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert [line.split(":")[0] for line in told] == ["TF32 is on"]
