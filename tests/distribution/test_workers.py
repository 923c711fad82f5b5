"""Several real workers on this machine, as `ddl.launch` starts them."""

import ast
import gc
import os
import shutil
import signal
import subprocess
import sys
import weakref

import numpy as np
import pytest
import tensorflow as tf

from ddl.distribution import multi_worker, workers
from ddl.errors import ConfigError, ModelDirectoryError, WorkerLost
from tests.distribution.whole_clusters import (
    addresses,
    arguments,
    assert_none_left,
    finish,
    finish_all,
    launch,
    processes_of,
    start_worker,
)
from tests.processes import forked
from tests.run.whole_runs import ROOT, lines, tensors


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    """What one process and one device train, in float64."""
    model_dir = tmp_path_factory.mktemp("one") / "run"
    command = [sys.executable, "-m", "ddl.main", "--strategy=one_device"]
    done = forked.run(
        [*command, *arguments(model_dir, "PRECISION = 'float64'")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return model_dir


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "devices"), [(3, 1), (2, 2)])
def test_workers_train_what_one_device_does(tmp_path, one_device, workers, devices):
    """With dropout, augmentation, synchronized normalization, microbatches and an average.

    The last batch of an evaluation has 72 of 96 examples, which are unequal shares of 3 and of 4
    replicas. Two workers resume at step 20 what one device began.
    """
    model_dir = tmp_path / "run"
    flags = [] if devices == 1 else [f"--num_virtual_devices={devices}"]
    if devices == 2:
        shutil.copytree(one_device, model_dir)
        for later in model_dir.glob("checkpoints/step-[46]0*"):
            later.unlink()
    status, output = finish(launch(workers, *arguments(model_dir, "PRECISION = 'float64'"), *flags))
    assert status == 0, output
    assert f"replicas: {workers * devices}" in output
    assert output.count("Done: step 60") == 1
    assert ("Restored step 20" in output) == (devices == 2)
    ours, theirs = tensors(model_dir), tensors(one_device)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        if getattr(value, "dtype", None) == np.float64:
            np.testing.assert_allclose(ours[name], value, rtol=0, atol=1e-9, err_msg=name)
    assert [(x["step"], x["split"]) for x in lines(model_dir)] == [
        (x["step"], x["split"]) for x in lines(one_device)
    ]
    for ours_line, line in zip(lines(model_dir), lines(one_device), strict=True):
        assert ours_line["loss"] == pytest.approx(line["loss"], abs=1e-9)
    assert_none_left(model_dir)


@pytest.mark.slow
def test_rounded_gradients_train_the_same_in_processes_and_on_devices(tmp_path, one_device):
    """In several buffers, which travel between processes and are summed at once on devices."""
    plan = ["PRECISION = 'float64'", "Trainer.gradient_dtype = 'bfloat16'", "TRAIN_STEPS = 20"]
    status, output = finish(
        launch(3, *arguments(tmp_path / "workers", *plan), "--bytes_per_pack=1024")
    )
    assert status == 0, output
    command = [sys.executable, "-m", "ddl.main", "--strategy=mirrored", "--num_virtual_devices=3"]
    forked.run([*command, *arguments(tmp_path / "devices", *plan)], cwd=ROOT, check=True)
    ours, theirs = tensors(tmp_path / "workers"), tensors(tmp_path / "devices")
    unrounded = tf.train.load_checkpoint(str(one_device / "checkpoints" / "step-20"))
    floats = [name for name, value in theirs.items() if getattr(value, "dtype", None) == np.float64]
    for name in floats:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=0, atol=1e-9, err_msg=name)
    assert max(np.abs(theirs[name] - unrounded.get_tensor(name)).max() for name in floats) > 1e-6
    assert_none_left(tmp_path / "workers")


@pytest.mark.slow
def test_workers_agree_on_the_step_at_which_they_stop(tmp_path):
    """One of them is asked; all save and end at the same step, with 75."""
    model_dir = tmp_path / "run"
    seldom = ["TRAIN_STEPS = 100000", "EVAL_EVERY = 100000", "CHECKPOINT_EVERY = 100000"]
    process = launch(2, *arguments(model_dir, *seldom), launcher=[f"--log_dir={tmp_path}/logs"])
    while not process.stdout.readline().startswith("step 20 "):
        assert process.poll() is None
    os.kill(processes_of(model_dir)[1], signal.SIGTERM)
    status, output = finish(process)
    assert status == 75, output
    saved = tf.train.latest_checkpoint(str(model_dir / "checkpoints"))
    step = f"at step {int(saved.rpartition('-')[2]):,} of 100,000, after saving"
    assert step in output
    assert f"Training stopped on SIGTERM {step}" in (tmp_path / "logs" / "worker-1.log").read_text()
    assert_none_left(model_dir)


# A user's layer and network, whose moments are not synchronized.
OWN_NETWORK = """
import gin, keras

@gin.register
def network():
    layers = [keras.layers.Flatten(), keras.layers.Dense(16), keras.layers.BatchNormalization()]
    head = [keras.layers.ReLU(), keras.layers.Dense(10)]
    return keras.Sequential([keras.Input((8, 8, 1)), *layers, *head])
"""


@pytest.fixture
def own_network(tmp_path, monkeypatch):
    """Flags that train it for so many steps into a folder."""
    (tmp_path / "own_network.py").write_text(OWN_NETWORK)
    (tmp_path / "own.gin").write_text(
        f"import own_network\ninclude '{ROOT}/configs/digits_mlp.gin'\n"
        "Classification.model = @network()\n"
        "Trainer.weight_average = @ExponentialMovingAverage()\n"
        "ExponentialMovingAverage.decay = 0.9\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")

    def flags(model_dir, steps):
        plan = ["PRECISION = 'float64'", f"TRAIN_STEPS = {steps}", "EVAL_EVERY = 20"]
        names = ("input_shape", "num_classes", "hidden_units", "input_scale")
        given = arguments(model_dir, *plan, config="digits_mlp.gin")
        allowed = "--gin_allow_unused=" + ",".join(f"mlp.{name}" for name in names)
        return [f"--gin_file={tmp_path}/own.gin", *given[1:], allowed]

    return flags


@pytest.mark.slow
def test_statistics_of_each_worker_are_averaged_and_kept(tmp_path, own_network):
    """As those of the replicas of one process; a resumed run restores those of each worker."""
    command = [sys.executable, "-m", "ddl.main", "--strategy=mirrored", "--num_virtual_devices=2"]
    done = forked.run(
        [*command, *own_network(tmp_path / "mirrored", 40)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for model_dir in (tmp_path / "straight", tmp_path / "run"):
        status, output = finish(launch(2, *own_network(model_dir, 40)))
        assert status == 0, output
        if model_dir.name == "straight":  # the other run resumes what this one saved first
            shutil.copytree(model_dir, tmp_path / "run")
            for later in (tmp_path / "run").glob("checkpoints/step-40*"):
                later.unlink()
        else:
            assert "Restored step 20" in output
    mirrored, straight, run = (tensors(tmp_path / n) for n in ("mirrored", "straight", "run"))
    of_replicas = [name for name in straight if "statistics_of_replicas" in name]
    assert len(of_replicas) == 4  # mean and variance, and their averages
    assert straight.keys() == mirrored.keys()
    for name, value in mirrored.items():
        np.testing.assert_array_equal(run[name], straight[name], err_msg=name)
        if getattr(value, "dtype", None) == np.float64:
            np.testing.assert_allclose(straight[name], value, rtol=0, atol=1e-9, err_msg=name)
    for name in of_replicas:
        assert len(straight[name]) == 2
        assert not np.array_equal(*straight[name])
    for ours, theirs in zip(
        lines(tmp_path / "straight"), lines(tmp_path / "mirrored"), strict=True
    ):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-9)
    assert lines(tmp_path / "run") == lines(tmp_path / "straight")
    assert_none_left(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("following", [False, True])
def test_several_workers_evaluate_what_was_saved(tmp_path, one_device, following):
    """The same figures as the run's own, each example counted once: 360 in batches of 96."""
    model_dir = tmp_path / "run"
    shutil.copytree(one_device, model_dir)
    (model_dir / "metrics.jsonl").unlink()
    flags = ["--mode=eval", *(["--follow_timeout=5"] if following else [])]
    params = arguments(model_dir, "PRECISION = 'float64'")
    status, output = finish(launch(2, *params, *flags))
    assert status == 0, output
    (ours,) = lines(model_dir)
    theirs = lines(one_device)[-1]
    assert (ours["step"], ours["split"]) == (theirs["step"], "eval")
    assert ours["accuracy"] == theirs["accuracy"]
    assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-12)
    assert output.count("Restored step 60") == (0 if following else 1)
    assert_none_left(model_dir)


# Prints what one worker sees; the numbers in it tell the workers apart.
SEES = """
import os, numpy as np, tensorflow as tf
from ddl.distribution.strategies import build_strategy
from ddl.distribution.workers import Workers
from ddl.distribution.multi_worker import leaving
with leaving():
    strategy = build_strategy("auto")
    workers = Workers(strategy)
    with strategy.scope():
        variable = tf.Variable(tf.fill([2], 7.0 + workers.index))
    print(workers.index, workers.number, workers.is_chief, variable.numpy().tolist())
    print(workers.any(workers.index == 1), workers.broadcast(3 + workers.index))
    rows = workers.gather(np.array([1.5, workers.index])).tolist()
    print(workers.gather_texts("x" * workers.index), rows)
os._exit(0)
"""


@pytest.mark.slow
def test_what_each_worker_sees():
    """Its rank, the size, the chief's initial values, and what the others say."""
    hosts = addresses(2)
    ended = finish_all([start_worker(index, hosts, program=("-c", SEES)) for index in range(2)])
    for index, (status, output) in enumerate(ended):
        assert status == 0, output
        assert output.splitlines()[-3:] == [
            f"{index} 2 {index == 0} [7.0, 7.0]",
            "True 3",
            "['', 'x'] [[1.5, 0.0], [1.5, 1.0]]",
        ]


# Prints which of 16 examples one worker reads, and gets in its first batch, whatever they are in.
READS = """
import os, sys, tensorflow as tf
from ddl.data import BatchPipeline, RandomAccessSource, RecordSource, StreamSource
from ddl.distribution.strategies import build_strategy
from ddl.distribution.multi_worker import leaving
reads = set()
def note(numbers):
    reads.update(numbers.ravel().tolist())
    return numbers
def noted(number):
    return {"x": tf.ensure_shape(tf.numpy_function(note, [number], tf.int64), [])}
def shard(epoch, number):  # the rows of each shard's part of a batch, batch by batch
    places = tf.constant([2 * number, 2 * number + 1, 2 * number + 8, 2 * number + 9], tf.int64)
    return tf.data.Dataset.from_tensor_slices(places).map(noted)
def decode(record, seed):
    return noted(tf.strings.to_number(record, tf.int64))
with leaving():
    strategy = build_strategy("auto")
    for source in (
        RandomAccessSource(lambda indices: {"x": note(indices)}, 16),
        StreamSource(shard, [4] * 4),
        RecordSource([sys.argv[1]], decode),
    ):
        pipeline = BatchPipeline(source, 8, shuffle=False, microbatches=2)
        reads.clear()
        batch = pipeline.next_batch(pipeline.iterator(strategy), strategy, tf.constant(0, tf.int64))
        for microbatch in range(2):
            take = tf.function(lambda one: pipeline.examples(one, microbatch))
            print(strategy.run(take, args=(batch,))["x"].numpy())
        print("reads", *sorted({number % 8 for number in reads}))  # of its later batches as well
os._exit(0)
"""


@pytest.mark.slow
def test_each_worker_reads_its_own_rows_alone(tmp_path):
    """Of lookups, shards of a stream and record files; two microbatches, for each its rows."""
    records = str(tmp_path / "records")
    with tf.io.TFRecordWriter(records) as file:
        for number in range(16):
            file.write(str(number).encode())
    hosts = addresses(2)
    program = ("-c", READS, records)
    ended = finish_all([start_worker(index, hosts, program=program) for index in range(2)])
    for (status, output), first in zip(ended, (0, 2), strict=True):
        assert status == 0, output
        own = [str(row) for row in (first, first + 1, first + 4, first + 5)]
        of_source = [f"[{' '.join(own[:2])}]", f"[{' '.join(own[2:])}]", f"reads {' '.join(own)}"]
        told = [line for line in output.splitlines() if not line.startswith("WARNING")]
        assert told[-9:] == of_source * 3, output


# A task whose loss is infinite on one replica of the second worker alone.
OVERFLOWS = """
import ddl, gin, numpy as np, tensorflow as tf

@gin.register
class Overflowing(ddl.Classification):
    def per_example(self, features, training):
        output = super().per_example(features, training)
        if not training:
            return output
        here = tf.distribute.get_replica_context().replica_id_in_sync_group
        return output._replace(loss=tf.where(tf.equal(here, 3), np.inf, 1.0) * output.loss)
"""


ON_GPU_PATH = """
import sys
from ddl.devices.path import GPU, taking
from ddl.main import run
with taking(GPU):
    run()
"""


@pytest.mark.slow
@pytest.mark.parametrize("program", [("-m", "ddl.main"), ("-c", ON_GPU_PATH)], ids=["cpu", "gpu"])
def test_all_workers_name_the_replica_that_overflowed(tmp_path, monkeypatch, program):
    (tmp_path / "overflows.py").write_text(OVERFLOWS)
    (tmp_path / "own.gin").write_text(
        f"import overflows\ninclude '{ROOT}/configs/digits_mlp.gin'\n"
        "Trainer.task = @Overflowing()\nOverflowing.model = @mlp()\n"
        "Trainer.max_skipped_updates = 2\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    precision = "PRECISION = 'mixed_float16'"
    plan = arguments(tmp_path / "run", precision, config="digits_mlp.gin")[1:]
    flags = [f"--gin_file={tmp_path}/own.gin", *plan, "--num_virtual_devices=2"]
    hosts = addresses(2)
    allowed = "--gin_allow_unused=Classification.model,Classification.label_smoothing"
    started = [start_worker(n, hosts, *flags, allowed, program=program) for n in (0, 1)]
    for status, output in finish_all(started):
        assert status == 76, output
        assert "logits/bias on replica 3 of worker 1." in output


@pytest.mark.slow
def test_several_workers_do_not_export(tmp_path):
    model_dir = tmp_path / "run"
    status, output = finish(launch(2, *arguments(model_dir), "--mode=export"))
    assert status == 1, output
    assert "--mode=export must run in one process, got 2 workers" in output
    assert not model_dir.exists() or not list(model_dir.glob("*.gin"))


@pytest.mark.slow
def test_workers_that_differ_are_refused_with_the_differences(tmp_path):
    model_dir = tmp_path / "run"
    hosts = addresses(2)
    other = "import ddl; ddl.__version__ = '9'; import ddl.main; ddl.main.run()"
    given = arguments(model_dir, config="digits_mlp.gin")
    workers = [
        start_worker(0, hosts, *given),
        start_worker(
            *(1, hosts, *given, "--gin_param=LEARNING_RATE = 0.5", "--gin_param=SEED = 3"),
            program=("-c", other),
        ),
    ]
    for status, output in finish_all(workers):
        assert status == 1, output
        assert "Worker 1 must have the code, versions, config and flags of worker 0, got" in output
        told = [
            line.split(", code")[0].strip() for line in output.splitlines() if "  worker" in line
        ]
        assert {line for line in told if line.startswith("worker 1: ")} == {
            *("worker 1: ddl 9", "worker 1: LEARNING_RATE = 0.5", "worker 1: SEED = 3"),
        }
        assert {line.split(" = ")[0] for line in told if line.startswith("worker 0: ")} == {
            *("worker 0: ddl 0.1.0", "worker 0: LEARNING_RATE", "worker 0: SEED"),
        }
    assert not list(model_dir.glob("*"))
    assert_none_left(model_dir)


class Watch:
    """A watch that knows of this loss."""

    def __init__(self, loss):
        self.loss = lambda wait: loss


@pytest.mark.parametrize(
    ("error", "loss", "raised", "told"),
    [
        (tf.errors.InternalError, None, tf.errors.InternalError, "a kernel failed"),
        (tf.errors.InternalError, "worker 1 died", WorkerLost, "worker 1 died"),
        (tf.errors.AbortedError, None, WorkerLost, "AbortedError: a kernel failed"),
        (tf.errors.InvalidArgumentError, "worker 1 died", tf.errors.InvalidArgumentError, "kernel"),
    ],
)
def test_a_workers_own_error_is_not_taken_for_anothers(monkeypatch, error, loss, raised, told):
    monkeypatch.setattr(multi_worker, "_PEERS", [Watch(loss)])
    where = "Graph execution error:\n\nDetected at node X (most recent call last):\n  File a\n"
    with pytest.raises(raised, match=told), multi_worker.worker_errors():
        raise error(None, None, f"{where}a kernel failed\nsomewhere")


@pytest.mark.parametrize("fails_elsewhere", [False, True])
def test_a_failure_of_one_is_a_failure_of_all(monkeypatch, fails_elsewhere):
    two = workers.Workers(tf.distribute.get_strategy())
    monkeypatch.setattr(two, "gather", lambda own: np.array([own, [float(fails_elsewhere)]]))
    with pytest.raises(ConfigError, match="here"), two.failing_together():
        raise ConfigError("here")
    if fails_elsewhere:
        with (
            pytest.raises(ModelDirectoryError, match=r"output of worker 1 shows .* start all work"),
            two.failing_together(),
        ):
            pass
    else:
        with two.failing_together():
            pass


def test_all_have_the_result_before_one_ends_with_an_error(monkeypatch):
    two = workers.Workers(tf.distribute.get_strategy())
    totals = []

    def total(values):
        totals.append(list(values))
        if len(totals) == 2:  # another worker is past the barrier and has ended
            raise tf.errors.UnavailableError(None, None, "aborted")
        return np.asarray(values)

    monkeypatch.setattr(two, "_total", total)
    with pytest.raises(ConfigError, match="here"), two.failing_together():
        raise ConfigError("here")
    assert totals == [[1.0], [0.0]]


def test_a_strategy_that_nobody_holds_is_freed():
    """One function for each strategy adds over the replicas; it must not keep the strategy."""
    strategy = tf.distribute.OneDeviceStrategy("CPU:0")
    function = workers._summing_of(strategy)
    assert workers._summing_of(strategy) is function
    freed = weakref.ref(strategy)
    del strategy, function
    gc.collect()
    assert freed() is None


SIGNALLED = """
import json, os, signal, socket
import tensorflow as tf
from ddl.distribution.timeouts import ClusterTimeouts
from ddl.launcher.tasks import free_ports
from ddl.distribution.loopback import listening_sockets
from ddl.distribution.multi_worker import build_multi_worker_strategy
own = f"127.0.0.1:{free_ports(1)[0]}"
task = {"type": "worker", "index": 0}
os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": [own]}, "task": task})
options = tf.distribute.experimental.CommunicationOptions()
build_multi_worker_strategy(options, ClusterTimeouts(join=30.0))
listening = listening_sockets(int(own.partition(":")[2]))
bound = [one.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16) for one in listening]
print(bound, flush=True)
signal.raise_signal(signal.SIGTERM)
os._exit(3)
"""


def test_sigterm_ends_a_worker_that_does_not_train_yet():
    """TensorFlow, having joined, only notes it. A cluster of one; about 5 s.

    Its server, which listens on all interfaces, is bound to the loopback device.
    """
    command = [sys.executable, "-c", SIGNALLED]
    done = forked.run(
        command, cwd=ROOT, check=False, timeout=300, stdout=subprocess.PIPE, text=True
    )
    assert done.returncode == -signal.SIGTERM
    bound = ast.literal_eval(done.stdout)
    assert bound
    assert set(bound) == {b"lo\0"}


def on_gpu_path(model_dir, *more):
    """Runs two workers of two devices each up to step 20; returns what they saved."""
    hosts = addresses(2)
    plan = ["PRECISION = 'float64'", "TRAIN_STEPS = 20", "CHECKPOINT_EVERY = 10", "LOG_EVERY = 8"]
    flags = [*arguments(model_dir, *plan), "--num_virtual_devices=2", *more]
    program = ("-c", ON_GPU_PATH)
    ended = finish_all([start_worker(i, hosts, *flags, program=program) for i in range(2)])
    assert [status for status, _ in ended] == [0, 0], ended
    return tensors(model_dir), ended[0][1]


@pytest.mark.slow
def test_workers_train_on_the_path_of_gpus_what_one_device_does(tmp_path, one_device):
    """Two devices each: every replica copies its part of the order to its device.

    Resumed at step 10 of 15 in the epoch, with batches that are made on the host, they end with
    the same bits.
    """
    ours, _ = on_gpu_path(tmp_path)
    theirs = tf.train.load_checkpoint(str(one_device / "checkpoints" / "step-20"))
    floats = [name for name, value in ours.items() if getattr(value, "dtype", None) == np.float64]
    assert len(floats) > 10
    for name in floats:
        expected = theirs.get_tensor(name)
        np.testing.assert_allclose(ours[name], expected, rtol=0, atol=1e-9, err_msg=name)
    for later in tmp_path.glob("checkpoints/step-20*"):
        later.unlink()
    resumed, output = on_gpu_path(tmp_path, "--data_on_device=false")
    assert "Restored step 10" in output
    for name in floats:
        np.testing.assert_array_equal(resumed[name], ours[name], err_msg=name)
