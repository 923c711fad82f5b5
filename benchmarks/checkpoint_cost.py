"""What saving costs a run: python -m benchmarks.checkpoint_cost.

ResNet-50 (25.6 million weights, with as many momenta) on one device, images of 32×32 in batches of
64. A block is as many updates as fit into 10 seconds, with one checkpoint at its beginning or
none; both kinds alternate, and each round's first kind does too. The figure is the ratio of their
times, so that it holds all of it: the look at the weights, the snapshot, the copies that the next
update makes, the file, and its way to the disk. A block with a checkpoint ends when that is
written. The same is measured with `tf.train.Checkpoint` as it comes, which the loop waits for. (Its
asynchronous option fails with Keras 3 at the second save: tests/test_keras_canaries.py.)
"""

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

import ddl
from ddl import distribution
from ddl.checkpoints import Checkpoints
from ddl.retention import Retention

BATCH = 64
SECONDS = 10.0
ROUNDS = {"ddl": 15, "TensorFlow": 4}


def make_trainer() -> ddl.Trainer:
    """ResNet-50 on noise."""
    keras.utils.set_random_seed(0)
    strategy = distribution.build_strategy("one_device")
    images = np.random.default_rng(0).normal(size=(BATCH * 8, 32, 32, 3)).astype("f4")
    with strategy.scope():
        network = keras.applications.ResNet50(
            weights=None, input_shape=(32, 32, 3), classes=1000, classifier_activation=None
        )
        return ddl.Trainer(
            ddl.Classification(network),
            keras.optimizers.SGD(1e-4, momentum=0.9),
            (images, np.arange(len(images)) % 10),
            global_batch_size=BATCH,
        )


def seconds(call: Callable[[], object]) -> float:
    """How long a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def ways_to_save(
    trainer: ddl.Trainer, folder: Path
) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """By name: what begins a save, and what waits for its end."""
    checkpoints = Checkpoints(folder / "ddl", trainer, Retention(last=1))

    def save() -> None:
        trainer.check_finite()
        checkpoints.save()

    theirs = tf.train.Checkpoint(model=trainer.model, optimizer=trainer.optimizer)
    return {
        "ddl": (save, checkpoints.finish),
        "TensorFlow": (lambda: theirs.write(str(folder / "plain")), lambda: None),
    }


def main() -> None:
    """Prints the table; with an argument, also writes it there as JSON."""
    distribution.configure_devices()
    folder = Path(tempfile.mkdtemp(prefix="checkpoint_cost"))
    trainer = make_trainer()
    trainer.train(3)  # traces
    steps = max(1, round(SECONDS / (seconds(lambda: trainer.train(10)) / 10)))
    ways = ways_to_save(trainer, folder)
    results = {}
    for name, (begin, end) in ways.items():
        for _ in range(3):  # until there are some to be removed
            trainer.train(1)
            begin()
            end()
        times: dict[bool, list[float]] = {True: [], False: []}
        begins = []

        def block(saves: bool, begin=begin, end=end, begins=begins) -> None:  # type: ignore[no-untyped-def]
            if saves:
                begins.append(seconds(begin))
            trainer.train(steps)
            if saves:
                end()

        for number in range(ROUNDS[name]):
            for saves in (True, False) if number % 2 else (False, True):
                times[saves].append(seconds(lambda saves=saves: block(saves)))
        with_save, without = np.array(times[True]), np.array(times[False])
        ratios = with_save / without
        results[name] = {
            "ratio": float(np.median(ratios)),
            "ratio_quartiles": [float(q) for q in np.percentile(ratios, (25, 75))],
            "seconds_without": float(np.median(without)),
            "seconds_with": float(np.median(with_save)),
            "seconds_in_call": float(np.median(begins)),
        }
    size = sum(path.stat().st_size for path in (folder / "plain").parent.glob("plain.*"))
    shutil.rmtree(folder)
    print(f"{size / 1e6:.0f} MB a checkpoint, {steps} updates a block")
    titles = ("rounds", "cost", "quartiles", "", "block", "with save", "in the call")
    print(f"{'':12}" + "".join(f"{title:>12}" for title in titles))
    for name, row in results.items():
        shares = [row["ratio"], *row["ratio_quartiles"]]
        times = (row["seconds_without"], row["seconds_with"], row["seconds_in_call"])
        print(
            f"{name:12}{ROUNDS[name]:>12}"
            + "".join(f"{100 * (share - 1):>11.2f}%" for share in shares)
            + "".join(f"{time:>11.3f}s" for time in times)
        )
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps({"megabytes": size / 1e6, **results}, indent=1))


if __name__ == "__main__":
    main()
