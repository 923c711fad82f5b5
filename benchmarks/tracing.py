"""Time to trace a deep model on several replicas: python -m benchmarks.tracing.

A synchronized layer sums over the replicas within the forward pass and again within the backward
pass (`ddl.layers.sum_over_replicas`). TensorFlow's own sum searches all operations traced so far,
so its time grows faster than the model. The benchmark counts the processor time of the first step
on two virtual devices: of networks of so many blocks of convolution, BatchNormalization and ReLU,
and of ResNet-50 at 64x64 pixels, synchronized or not. Each figure comes from a fresh process.
"""

import os
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np

from benchmarks import command, repeats
from benchmarks.repeats import interleaved, spread
from benchmarks.report import Bar, Plot, Report, Series, Table
from benchmarks.turns import Contender, Turns

DEPTHS = (4, 8, 16, 32)
RESNET = 50
ROUNDS = 2


def first_step(case: tuple[int, bool], turns: Turns) -> None:
    """Reports the processor seconds of the first step of a network of `depth` blocks."""
    import keras

    import ddl
    from ddl import distribution

    depth, synchronized = case
    distribution.configure_devices(num_virtual_devices=2)
    keras.utils.set_random_seed(0)
    data = ddl.data.synthetic_images(
        "train",
        image_shape=(64, 64, 3) if depth == RESNET else (8, 8, 3),
        num_classes=10,
        num_examples=8,
    )
    with distribution.build_strategy("mirrored").scope():
        model = _resnet() if depth == RESNET else _blocks(depth)
        for layer in model.layers:
            if isinstance(layer, keras.layers.BatchNormalization):
                layer.synchronized = synchronized
        trainer = ddl.Trainer(
            ddl.Classification(model), keras.optimizers.SGD(0.1), data, global_batch_size=4
        )
    while turns.wait():
        before = os.times()
        trainer.train(1)
        after = os.times()
        turns.report(after.user + after.system - before.user - before.system)


def _resnet() -> Any:
    import keras

    return keras.applications.ResNet50(
        weights=None, input_shape=(64, 64, 3), classes=10, classifier_activation=None
    )


def _blocks(depth: int) -> Any:
    import keras

    x = inputs = keras.Input((8, 8, 3))
    for _ in range(depth):
        x = keras.layers.Conv2D(4, 3, padding="same", use_bias=False)(x)
        x = keras.layers.ReLU()(keras.layers.BatchNormalization()(x))
    return keras.Model(inputs, keras.layers.Dense(10)(keras.layers.GlobalAveragePooling2D()(x)))


def in_a_process(depth: int, synchronized: bool) -> float:
    """Returns the processor seconds of a first step in a fresh process."""
    contender = Contender("benchmarks.tracing:first_step", [(depth, synchronized)], {})
    try:
        return contender.window()
    finally:
        contender.close()


def measure(quick: bool) -> Report:
    """Measures all depths, with and without synchronization by turns."""
    depths = DEPTHS[:1] if quick else (*DEPTHS, RESNET)
    rounds = 1 if quick else ROUNDS
    rows, ratios = [], {}
    for depth in depths:
        found = interleaved(
            {
                kind: lambda depth=depth, kind=kind: in_a_process(depth, kind == "synchronized")
                for kind in ("synchronized", "not synchronized")
            },
            rounds,
        )
        together, apart = (np.asarray(times) for times in found.values())
        ratios[depth] = repeats.ratio(together / apart)
        name = "ResNet-50" if depth == RESNET else f"{depth} blocks"
        rows.append([name, spread(together), spread(apart), ratios[depth]])
    table = Table(
        "Processor seconds of the first step",
        ["", "synchronized", "not synchronized", "ratio"],
        rows,
    )
    series = [
        Series(name, [float(depth) for depth in depths], [row[column] for row in rows])
        for column, name in ((1, "synchronized"), (2, "not synchronized"))
    ]
    bars = [Bar(f"{rows[-1][0]}: synchronized / not", ratios[depths[-1]], 1.5, "at most")]
    plot = Plot("First step", "layers of normalization", "processor s", series, log_x=True)
    return Report([table], bars, [plot])


if __name__ == "__main__":
    command.main(measure)
