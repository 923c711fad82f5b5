"""Time to trace a deep model on several replicas: python -m benchmarks.tracing.

A synchronized layer sums over the replicas within the forward pass and again within the backward
pass (`ddl.layers.sum_over_replicas`). TensorFlow's own sum searches all operations traced so far,
so its time grows faster than the model. The benchmark counts the processor time of the first step
on two virtual devices: of networks of so many blocks of convolution, BatchNormalization and ReLU,
and of ResNet-50 and MobileNetV2 at 64x64 pixels, synchronized or not. The second table counts the
same on one device for a chain of 1,000 dense layers, 2,002 variables, with Adam: of ddl beside
Keras's fit. Each figure comes from a fresh process.
"""

import functools
import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np

from benchmarks import command, repeats
from benchmarks.repeats import interleaved, spread
from benchmarks.report import Bar, Plot, Report, Series, Table
from benchmarks.turns import Contender, Turns

DEPTHS = (4, 8, 16, 32)
RESNET = 50
# Layers of normalization of Keras's networks, which stand for the network in a case.
APPLICATIONS = {RESNET: ("ResNet50", "ResNet-50"), 52: ("MobileNetV2", "MobileNetV2")}
LAYERS = 1000
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
        image_shape=(64, 64, 3) if depth in APPLICATIONS else (8, 8, 3),
        num_classes=10,
        num_examples=8,
    )
    with distribution.build_strategy("mirrored").scope():
        model = _application(depth) if depth in APPLICATIONS else _blocks(depth)
        for layer in model.layers:
            if isinstance(layer, keras.layers.BatchNormalization):
                layer.synchronized = synchronized
        trainer = ddl.Trainer(
            ddl.Classification(model), keras.optimizers.SGD(0.1), data, global_batch_size=4
        )
    _report_processor_time(lambda: trainer.train(1), turns)


def of_many_variables(case: tuple[int, bool], turns: Turns) -> None:
    """Reports the same of a chain of dense layers, on one device, by ddl or by Keras's fit."""
    import keras

    import ddl

    layers, is_ddl = case
    keras.utils.set_random_seed(0)
    x = inputs = keras.Input((4,))
    for _ in range(layers):
        x = keras.layers.Dense(4, activation="relu")(x)
    model = keras.Model(inputs, keras.layers.Dense(2)(x))
    features, labels = np.ones((8, 4), np.float32), np.zeros(8, np.int64)
    if is_ddl:
        trainer = ddl.Trainer(
            ddl.Classification(model),
            keras.optimizers.Adam(),
            {"image": features, "label": labels},
            global_batch_size=8,
        )
        _report_processor_time(lambda: trainer.train(1), turns)
    else:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(), loss)
        fit = functools.partial(model.fit, features, labels, batch_size=8, verbose=0)
        _report_processor_time(fit, turns)


def _report_processor_time(step: Callable[[], object], turns: Turns) -> None:
    while turns.wait():
        before = os.times()
        step()
        after = os.times()
        turns.report(after.user + after.system - before.user - before.system)


def _application(depth: int) -> Any:
    import keras

    network = getattr(keras.applications, APPLICATIONS[depth][0])
    return network(weights=None, input_shape=(64, 64, 3), classes=10, classifier_activation=None)


def _blocks(depth: int) -> Any:
    import keras

    x = inputs = keras.Input((8, 8, 3))
    for _ in range(depth):
        x = keras.layers.Conv2D(4, 3, padding="same", use_bias=False)(x)
        x = keras.layers.ReLU()(keras.layers.BatchNormalization()(x))
    return keras.Model(inputs, keras.layers.Dense(10)(keras.layers.GlobalAveragePooling2D()(x)))


def in_a_process(function: str, *case: Any) -> float:
    """Returns the processor seconds of a first step in a fresh process."""
    contender = Contender(f"benchmarks.tracing:{function}", [case], {})
    try:
        return contender.window()
    finally:
        contender.close()


def measure(quick: bool) -> Report:
    """Measures all depths, with and without synchronization by turns."""
    depths = DEPTHS[:1] if quick else (*DEPTHS, *APPLICATIONS)
    rounds = 1 if quick else ROUNDS
    rows, ratios = [], {}
    for depth in depths:
        found = interleaved(
            {
                kind: functools.partial(in_a_process, "first_step", depth, kind == "synchronized")
                for kind in ("synchronized", "not synchronized")
            },
            rounds,
        )
        together, apart = (np.asarray(times) for times in found.values())
        ratios[depth] = repeats.ratio(together / apart)
        name = APPLICATIONS[depth][1] if depth in APPLICATIONS else f"{depth} blocks"
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
    of_bar = depths[0] if quick else RESNET
    name = rows[depths.index(of_bar)][0]
    bars = [Bar(f"{name}: synchronized / not", ratios[of_bar], 1.5, "at most")]
    plot = Plot("First step", "layers of normalization", "processor s", series, log_x=True)
    return Report([table, _beside_fit(10 if quick else LAYERS, rounds)], bars, [plot])


def _beside_fit(layers: int, rounds: int) -> Table:
    found = interleaved(
        {
            name: functools.partial(in_a_process, "of_many_variables", layers, name == "ddl")
            for name in ("ddl", "Keras's fit")
        },
        rounds,
    )
    ours, theirs = (np.asarray(times) for times in found.values())
    row = [f"{2 * layers + 2:,} variables", spread(ours), spread(theirs)]
    return Table(
        "Processor seconds of the first step on one device",
        ["", *found, "ddl / fit"],
        [[*row, repeats.ratio(ours / theirs)]],
    )


if __name__ == "__main__":
    command.main(measure)
