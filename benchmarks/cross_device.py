"""All-reduce between the replicas of one process: python -m benchmarks.cross_device.

The same updates run with each of TensorFlow's all-reduces, on 2 and 4 replicas: on GPUs if there
are several, otherwise on virtual CPU devices. ddl's default
(`ddl.distribution.communication.Communication`) is the first row; a row clearly below 1 means that
this default is wrong for this kind of device. The MLP has 4 gradients of 0.4 MB in total, the CNN 8
gradients of 4.8 MB.
"""

from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

import ddl
from benchmarks import command, networks, repeats
from benchmarks.report import Plot, Report, Series, Table
from ddl import distribution
from ddl.devices.path import path_for
from ddl.distribution.communication import Communication, cross_device_ops
from ddl.optimizers import FusedAdam

REPLICAS = (2, 4)
BATCH = 64
STEPS = {"MLP": 100, "CNN": 10}
ROUNDS = 7
AUTOMATIC = "ddl's choice"


def ways(on_gpu: bool) -> dict[str, Communication]:
    """Returns the all-reduces to compare, ddl's default first."""
    found = {
        AUTOMATIC: Communication(),
        "hierarchical copy, 1 buffer": Communication("hierarchical_copy", num_packs=1),
        "hierarchical copy, 2 buffers": Communication("hierarchical_copy", num_packs=2),
        "hierarchical copy, unpacked": Communication("hierarchical_copy", num_packs=0),
        "on one device, unpacked": Communication("reduction_to_one_device"),
    }
    if on_gpu:
        found["NCCL, 1 buffer"] = Communication("nccl", num_packs=1)
    return found


def model(name: str) -> keras.Model:
    """Builds the network of one of two tutorials."""
    return networks.mlp() if name == "MLP" else networks.cnn()


def trainer(name: str, devices: list[str], way: Communication) -> ddl.Trainer:
    """Builds a trainer of one of the models on the given devices."""
    strategy = tf.distribute.MirroredStrategy(
        devices, cross_device_ops=cross_device_ops(way, path_for(devices))
    )
    random = np.random.default_rng(0)
    data = random.integers(0, 256, (6400, 28, 28, 1)).astype("u1"), random.integers(0, 10, 6400)
    keras.utils.set_random_seed(0)
    with strategy.scope():
        return ddl.Trainer(
            ddl.Classification(model(name)),
            FusedAdam(1e-3),
            data,
            global_batch_size=BATCH,
            steps_per_loop=STEPS[name],
            communication=way,
        )


def milliseconds(trained: ddl.Trainer, steps: int) -> Callable[[], float]:
    """Returns a function that makes `steps` updates and returns the milliseconds of one."""
    return lambda: repeats.seconds(lambda: trained.train(steps)) / steps * 1e3


def measure(quick: bool) -> Report:
    """Measures the ratios to ddl's default."""
    gpus = tf.config.list_physical_devices("GPU")
    if len(gpus) < 2:
        distribution.configure_devices(num_virtual_devices=max(REPLICAS))
    kind = "GPU" if len(gpus) > 1 else "CPU"
    devices = [device.name for device in tf.config.list_logical_devices(kind)]
    compared = ways(kind == "GPU")
    rows, series = [], []
    for name in STEPS:
        for replicas in REPLICAS:
            if replicas > len(devices):
                continue
            trainers = {
                way: trainer(name, devices[:replicas], communication)
                for way, communication in repeats.rotated(compared).items()
            }
            for each in trainers.values():
                each.train(2)
            timed = {way: milliseconds(trainers[way], STEPS[name]) for way in compared}
            times = repeats.interleaved(timed, 2 if quick else ROUNDS)
            ratios = {way: repeats.ratio(found / times[AUTOMATIC]) for way, found in times.items()}
            own = repeats.spread(times[AUTOMATIC])
            rows += [[f"{name}, {replicas} × {kind}", own, *[*ratios.values()][1:]]]
            series.append(Series(f"{name}, {replicas}", [*ratios][1:], [*ratios.values()][1:]))
    columns = ["model, replicas", f"{AUTOMATIC}, ms", *[*compared][1:]]
    return Report(
        [Table(f"Time per step relative to {AUTOMATIC}", columns, rows)],
        plots=[Plot("Time per step", "", f"relative to {AUTOMATIC}", series, level=1)],
    )


if __name__ == "__main__":
    command.main(measure, processes=5)  # each all-reduce has each place once
