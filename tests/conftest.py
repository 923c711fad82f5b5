"""Four virtual CPU devices for the whole test process, and strategies over them."""

import ctypes
import dataclasses
import gc
import itertools
import os
import signal
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.pop("COLUMNS", None)  # else commands wrap their lines; pytest's workers set it

import hypothesis
import keras
import pytest
import tensorflow as tf
from tensorflow.python.framework import ops

from ddl import output
from ddl.checkpoints.checkpoints import Checkpoints
from ddl.distribution import path as device_path
from ddl.microbatch import Microbatch
from ddl.random import batch_counter
from ddl.tasks.parts import layers_of
from ddl.training.probes import Probe

# Each of TensorFlow's many threads would keep freed memory in an arena of its own.
ctypes.CDLL(None).mallopt(-8, 2)  # M_ARENA_MAX

# What was imported stays. Searching it for garbage takes 5% of the time of all tests.
gc.collect()
gc.freeze()
gc.set_threshold(10_000, 20, 20)


@pytest.fixture(autouse=True)
def _left_as_it_was(monkeypatch):
    """Restores Keras's precision and the name under which this process speaks; frees graphs.

    Handles SIGINT as Python does, which a shell that starts the tests in the background ignores.
    """
    monkeypatch.setattr(output, "_program", output._program)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    began = time.monotonic()
    yield
    signal.signal(signal.SIGINT, before)
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")
    if time.monotonic() - began > 1.0:  # the test traced something
        gc.collect()  # to which graphs are few objects: by itself it would wait


@pytest.fixture(scope="module", autouse=True)
def _custom_gradients_forgotten():
    """Frees a module's graphs: TensorFlow keeps each custom gradient, with its graph, for good."""
    registered = ops.gradient_registry._registry
    before = set(registered)
    yield
    for name in set(registered) - before:
        if name.startswith("CustomGradient"):
            del registered[name]
    gc.collect()


# A busy machine draws examples slowly: no fault of a test, and none fails by chance.
hypothesis.settings.register_profile(
    "always",
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
    derandomize=True,
)
hypothesis.settings.load_profile("always")

tf.config.set_visible_devices([], "GPU")
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0],
    [tf.config.LogicalDeviceConfiguration() for _ in range(4)],
)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Seeds each test, before its fixtures: a test that can fail by chance always or never does."""
    keras.utils.set_random_seed(0)


# Reasons for which a test may be skipped; `make release-check` has wandb.
EXPECTED_SKIPS = ("there is no GPU", "could not import 'wandb'")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    """Fails a test that is skipped for another reason, so that no skip goes unseen."""
    report = yield
    is_skipped = report.skipped and not hasattr(report, "wasxfail")
    if is_skipped and not any(reason in str(report.longrepr) for reason in EXPECTED_SKIPS):
        report.outcome = "failed"
        report.longrepr = f"unexpected skip, see tests/conftest.py: {report.longrepr}"
    return report


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs tests of real processes once more when they fail: a busy machine can outlast a limit."""
    for item in items:
        if item.get_closest_marker("processes"):
            item.add_marker(pytest.mark.flaky(reruns=1))


def make_strategy(name: str, replicas: int) -> tf.distribute.Strategy:
    devices = [f"CPU:{index}" for index in range(replicas)]
    if name == "one_device":
        return tf.distribute.OneDeviceStrategy("CPU:0")
    if name == "mirrored":
        reduction = tf.distribute.ReductionToOneDevice()
        return tf.distribute.MirroredStrategy(devices, cross_device_ops=reduction)
    assert name == "central_storage"
    return tf.distribute.experimental.CentralStorageStrategy(devices, "CPU:0")


class LikeGpus(tf.distribute.MirroredStrategy):
    """CPU devices with the all-reduce of GPUs. For use in `taking(device_path.GPU)`.

    Attributes:
      distributed: Data sets that were distributed to the replicas.
    """

    # TensorFlow names the groups of collectives by number, anew in each strategy.
    _groups = itertools.count(1_000, 1_000)

    def __init__(self, replicas: int, first: int = 0):
        self._collective_key_base = next(self._groups)
        self.distributed: list[tf.data.Dataset] = []
        super().__init__([f"CPU:{first + i}" for i in range(replicas)])

    def experimental_distribute_dataset(self, dataset, options=None):
        self.distributed.append(dataset)
        return super().experimental_distribute_dataset(dataset, options)


@pytest.fixture
def gpu_path():
    """Takes the choices for GPUs on the CPU devices, but compiles nothing, which takes long."""
    with device_path.taking(dataclasses.replace(device_path.GPU, compiles=False)):
        yield


class EachDrawByRow(dict):
    """A placing of all draws with one row for each example."""

    def __contains__(self, key: object) -> bool:
        return True

    def __missing__(self, key: object) -> int:
        return 1


def microbatch(first_row=0, rows=8, batch=3, seed=5, training=True, mask=None) -> Microbatch:
    """Builds a microbatch, for calling layers without a trainer; each example draws its own."""
    return Microbatch(
        seed=seed,
        training=training,
        counter=batch_counter(tf.cast(batch, tf.int64)),
        first_row=first_row,
        rows=rows,
        mask=None if mask is None else tf.constant(mask),
        placing=EachDrawByRow(),
    )


def save(folder, trainer) -> str:
    """Saves a trainer, waits for the save and returns the checkpoint's TensorFlow prefix."""
    checkpoints = Checkpoints(folder, trainer)
    checkpoints.save()
    checkpoints.finish()
    return checkpoints.saved()[-1].prefix


# One of each kind.
STRATEGIES = [("one_device", 1), ("mirrored", 4), ("central_storage", 2)]


def name_of(case: tuple[str, int]) -> str:
    return f"{case[0]}-{case[1]}"


@pytest.fixture(params=STRATEGIES, ids=name_of)
def strategy(request) -> tf.distribute.Strategy:
    """A strategy of each kind."""
    return make_strategy(*request.param)


@pytest.fixture(scope="module", autouse=True)
def _rows_checked_once():
    """Checks the independence of rows once for each task and shapes of a module.

    Most trainers of a module train the same tasks. Only a check that passed is left out later, so
    a test that expects a refusal of an equal task fails rather than passes.
    """
    check, passed = Probe.check_rows, set()

    def check_once(self, *passes):
        spec = tuple((name, str(each)) for name, each in self.pipeline.element_spec.items())
        layers = tuple(
            (type(layer), *(str(v.shape) + v.dtype for v in layer.variables))
            for layer in layers_of(self.loss.task)
        )
        where, size = self.loss.where, self.pipeline.global_batch_size
        key = (type(self.loss.task), where, layers, spec, size, self.training)
        if key not in passed:
            check(self, *passes)
        passed.add(key)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Probe, "check_rows", check_once)
        yield
