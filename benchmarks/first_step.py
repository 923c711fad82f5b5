"""Time to the first and the last step, and memory: python -m benchmarks.first_step.

The benchmark compares `ddl.main` with configs/mnist_mlp.gin, without and with XLA, to a bare Keras
script with the same network, Adam and batches of 25. All read 60,000 images from Keras's cache.
Time counts from the start of the process. ddl's imports include the reading of the config; the
first step is over when the first call of the training loop, or Keras's first batch, ends; the last
one is number 2,000. The memory is the peak resident memory of the process.
"""

import compileall
import gzip
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks import harness
from benchmarks.harness import ROOT, Options, Report, Table, Target, spread

STEPS = 2_000
PARTS = ("imports", "first step", "last step", "memory, MB")
_NOTE = """
import atexit, json, os, time
times = {}
def note(name):
    times.setdefault(name, time.time())
atexit.register(lambda: open(os.environ["FIRST_STEP_TIMES"], "w").write(json.dumps(times)))
"""
DDL = f"""{_NOTE}
import ddl.main
build = ddl.main.build_placement
def placed(values):
    placement = build(values)
    note("imports")
    from ddl.training.trainer import Trainer
    train = Trainer.train
    def noted(trainer, steps, after_loop, **kwargs):
        result = train(trainer, steps, [lambda step: note("first step"), *after_loop], **kwargs)
        note("last step")
        return result
    Trainer.train = noted
    return placement
ddl.main.build_placement = placed
ddl.main.run()
"""
KERAS = f"""{_NOTE}
import keras
note("imports")
class First(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        note("first step")
(images, labels), _ = keras.datasets.fashion_mnist.load_data()
layers = keras.layers
model = keras.Sequential([
    keras.Input((28, 28, 1)), layers.Rescaling(1 / 255), layers.Flatten(),
    layers.Dense(128, activation="relu"), layers.Dropout(0.2), layers.Dense(10),
])
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(keras.optimizers.Adam(0.001), loss, metrics=["accuracy"])
model.fit(images[..., None], labels, 25, steps_per_epoch={STEPS}, verbose=0, callbacks=[First()])
note("last step")
"""
_FLAGS = (
    f"--gin_file={ROOT / 'configs' / 'mnist_mlp.gin'}",
    *("--gin_param=TRAIN_EPOCHS = None", f"--gin_param=TRAIN_STEPS = {STEPS}"),
    *("--gin_param=DATA = 'fashion_mnist'", "--mode=train", "--strategy=one_device"),
)
PROGRAMS = {
    "ddl": (DDL, *_FLAGS),
    "ddl, XLA": (DDL, *_FLAGS, "--jit_compile=on"),
    "Keras": (KERAS,),
}


def write_images(folder: Path) -> None:
    """Writes noise into the files of Fashion-MNIST in Keras's cache."""
    generator = np.random.default_rng(0)
    folder = folder / "datasets" / "fashion-mnist"
    folder.mkdir(parents=True)
    for name, count in (("train", 60_000), ("t10k", 10_000)):
        images = generator.integers(0, 256, count * 784, np.uint8)
        labels = generator.integers(0, 10, count, np.uint8)
        for kind, header, values in (
            ("images-idx3", (0x803, count, 28, 28), images),
            ("labels-idx1", (0x801, count), labels),
        ):
            content = np.array(header, ">i4").tobytes() + values.tobytes()
            path = folder / f"{name}-{kind}-ubyte.gz"
            path.write_bytes(gzip.compress(content, compresslevel=1))


def one_run(program: Sequence[str], cache: Path) -> dict[str, float]:
    """Runs a program; returns its `PARTS`, in seconds and MB."""
    with tempfile.TemporaryDirectory(prefix="first_step") as folder:
        times = Path(folder) / "times"
        environment = {"KERAS_HOME": str(cache), "FIRST_STEP_TIMES": str(times)}
        environment |= {"TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(ROOT)}
        arguments = [sys.executable, "-c", *program]
        arguments += [f"--model_dir={folder}/run"] if len(program) > 1 else []
        start = time.time()
        memory = harness.peak_memory(arguments, **environment)
        found = json.loads(times.read_text())
    return {name: moment - start for name, moment in found.items()} | {"memory, MB": memory}


def measure(options: Options) -> Report:
    """Runs the programs by turns."""
    compileall.compile_dir(ROOT / "ddl", quiet=1)  # as an installation does
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in options.chosen(PROGRAMS)}
    with tempfile.TemporaryDirectory(prefix="keras_home") as folder:
        write_images(Path(folder))
        for _ in range(1 if options.quick else 5):
            for name, found in runs.items():
                found.append(one_run(PROGRAMS[name], Path(folder)))
    values = {
        name: {part: np.array([run[part] for run in found]) for part in PARTS}
        for name, found in runs.items()
    }
    rows = [[name, *(spread(of[part]) for part in PARTS)] for name, of in values.items()]
    targets = []
    if {"ddl", "Keras"} <= values.keys():
        ours, theirs = values["ddl"], values["Keras"]
        later = spread(ours["first step"] - theirs["first step"])
        more = spread(ours["memory, MB"] / theirs["memory, MB"])
        targets.append(Target("ddl's first step minus Keras's, s", later, 0.3, "at most"))
        targets.append(Target("ddl's peak memory / Keras's", more, 1.1, "at most"))
    return Report([Table("Seconds, and memory", ["", *PARTS], rows)], targets)


if __name__ == "__main__":
    harness.main(measure)
