"""Augmentation in the update or in the input: python -m benchmarks.augmentation.

A small CNN trains on a stream of 64×64 colour images in batches of 64, on one device. ddl's layers
augment the images in the update, on the device, where each image draws by its position in the
global batch; or the same layers augment each image in a map of the stream, on the host, before
ddl forms batches. There they draw from a generator, so that results depend on the order of threads.
Here both share the cores of a CPU; a GPU would do the first beside the host's work.
"""

import os
from collections.abc import Callable, Mapping, Sequence

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

import ddl
from benchmarks import command, repeats, report
from benchmarks.repeats import spread
from benchmarks.report import Report, Table
from ddl import distribution
from ddl.optimizers import FusedAdam

SHAPE, BATCH, STEPS, ROUNDS = (64, 64, 3), 64, 40, 5
AUGMENTATIONS: Mapping[str, Callable[[], list[keras.layers.Layer]]] = {
    "flip and shift": lambda: [
        ddl.layers.RandomFlip("horizontal"),
        ddl.layers.RandomShift(8, 8),
    ],
    "resized crop and flip": lambda: [
        ddl.layers.RandomResizedCrop(*SHAPE[:2]),
        ddl.layers.RandomFlip("horizontal"),
    ],
    "colour jitter": lambda: [ddl.layers.ColorJitter()],
    "RandAugment": lambda: [ddl.layers.RandAugment()],
}
PLAIN, IN_UPDATE, IN_INPUT = "no augmentation", "in the update", "in the input"


def trainer_of(
    in_update: Sequence[keras.layers.Layer], in_input: Sequence[keras.layers.Layer]
) -> ddl.Trainer:
    """Builds a Trainer on a stream, with augmentations in the update or in the input."""
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (2 * BATCH * STEPS, *SHAPE)).astype(np.uint8)
    labels = random.integers(0, 10, len(images))

    def augmented(features: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        image = features["image"][tf.newaxis]
        for layer in in_input:
            image = layer(image, training=True)
        return {**features, "image": image[0]}

    stream = tf.data.Dataset.from_tensor_slices({"image": images, "label": labels})
    if in_input:
        stream = stream.map(augmented, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
    with distribution.build_strategy("one_device").scope():
        model = ddl.models.cnn(SHAPE, 10, blocks=((8,), (16,)), hidden_units=(32,))
        task = ddl.Classification(model, augmentations=list(in_update))
        return ddl.Trainer(
            task,
            FusedAdam(),
            ddl.data.StreamSource(stream, shuffle_buffer=BATCH),  # little is read ahead of a window
            global_batch_size=BATCH,
            steps_per_loop=STEPS,
        )


def run(name: str, layers: Callable[[], list[keras.layers.Layer]], rounds: int) -> list[object]:
    """Measures one augmentation in both places, beside the training without it."""
    trainers = {
        PLAIN: trainer_of([], []),
        IN_UPDATE: trainer_of(layers(), []),
        IN_INPUT: trainer_of([], layers()),
    }

    def window(trainer: ddl.Trainer) -> float:
        return repeats.seconds(lambda: trainer.train(STEPS)) / STEPS * 1e3

    for trainer in trainers.values():
        window(trainer)  # traces
    timed = {place: lambda t=trainer: window(t) for place, trainer in trainers.items()}
    times = repeats.interleaved(timed, rounds)
    return [
        name,
        repeats.ratio(times[IN_UPDATE] / times[IN_INPUT]),
        *(spread(times[place]) for place in trainers),
    ]


def measure(quick: bool) -> Report:
    """Measures each augmentation."""
    rounds = 1 if quick else ROUNDS
    rows = [run(name, layers, rounds) for name, layers in AUGMENTATIONS.items()]
    times = [f"ms per update, {place}" for place in (PLAIN, IN_UPDATE, IN_INPUT)]
    table = Table("", ["", "time in the update / in the input", *times], rows)
    return Report([table], plots=[report.plot_of(table, times, "ms per update")])


if __name__ == "__main__":
    command.main(measure)
