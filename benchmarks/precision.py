"""Number formats: python -m benchmarks.precision.

ddl trains in float32, mixed_float16 (with its loss scale, finite check and skipping) and
mixed_bfloat16. The figures are images per second relative to float32, and memory. On a CPU the
networks are the CNN of configs/digits_cnn.gin and the second tutorial's MLP, and the memory is the
peak resident memory. On a GPU, if there is one, they are the third tutorial's CNN and ResNet-50 on
64×64, and the memory is the peak that the process allocated on it.
"""

import os
from typing import Any, NamedTuple

from benchmarks import command, networks, repeats
from benchmarks.repeats import interleaved, seconds, spread
from benchmarks.report import Plot, Report, Series, Table
from benchmarks.turns import Contender, Turns

PRECISIONS = ("float32", "mixed_float16", "mixed_bfloat16")
ROUNDS = 7


class Case(NamedTuple):
    """A network, its format and device, and the number of updates in a window."""

    network: str
    batch: int
    steps: int
    precision: str = "float32"
    on_gpu: bool = False


ON_CPU = (Case("digits CNN", 64, 100), Case("MLP", 512, 50))
ON_GPU = (Case("CNN", 2048, 100), Case("ResNet-50", 256, 20))


def network(name: str) -> Any:
    """Builds the model, whose input is float32 images."""
    import keras

    import ddl

    if name == "digits CNN":
        blocks = ((32,), (64,))
        return ddl.models.cnn((8, 8, 1), 10, blocks=blocks, hidden_units=(64,), padding="same")
    if name == "MLP":
        return networks.mlp()
    if name == "CNN":
        return networks.cnn()
    return keras.applications.ResNet50(
        weights=None, input_shape=(64, 64, 3), classes=10, classifier_activation=None
    )


def train(case: Case, turns: Turns) -> None:
    """Trains in a separate process; reports a window's seconds and the peak memory in MB."""
    import keras
    import tensorflow as tf

    import ddl
    from benchmarks.memory import megabytes
    from ddl import distribution
    from ddl.precision import set_numerics

    distribution.configure_devices(gpus=None if case.on_gpu else ())
    set_numerics(case.precision, seed=0)
    strategy = distribution.build_strategy("one_device")
    with strategy.scope():
        model = network(case.network)
        data = ddl.data.synthetic_images(
            "train", image_shape=model.input_shape[1:], num_classes=10, num_examples=16 * case.batch
        )
        trainer = ddl.Trainer(
            ddl.Classification(model),
            keras.optimizers.Adam(),
            data,
            global_batch_size=case.batch,
            steps_per_loop=case.steps,
        )
    while turns.wait():
        time = seconds(lambda: trainer.train(case.steps))
        if case.on_gpu:
            memory = tf.config.experimental.get_memory_info("GPU:0")["peak"] / 2**20
        else:
            memory = megabytes(os.getpid())["peak"]
        turns.report((time, memory))


def measure(quick: bool) -> Report:
    """Measures on the CPU, and on a GPU if there is one."""
    cases = list(ON_CPU)
    if command.machine()["gpus"] != "none":
        cases += [case._replace(on_gpu=True) for case in ON_GPU]
    rows, series = [], []
    for case in cases:
        found, memory = measure_case(case, quick)
        name = f"{case.network} {case.batch}, {'GPU' if case.on_gpu else 'CPU'}"
        ratios = [repeats.ratio(found[p] / found["float32"]) for p in PRECISIONS]
        series.append(Series(name, list(PRECISIONS), ratios))
        rows += [
            [f"{name}: {p}", ratio, spread(found[p]), memory[p]]
            for p, ratio in zip(PRECISIONS, ratios, strict=True)
        ]
    columns = ["", "speed / float32", "images/s", "memory, MB"]
    return Report(
        [Table("", columns, rows)],
        plots=[Plot("Speed relative to float32", "", "times as fast", series, level=1.0)],
    )


def measure_case(case: Case, quick: bool) -> tuple[dict[str, Any], dict[str, float]]:
    """Returns each format's images per second in each round, and its memory."""
    case = case._replace(steps=5) if quick else case
    memory: dict[str, float] = {}
    contenders = {
        precision: Contender(
            "benchmarks.precision:train",
            [case._replace(precision=precision)],
            {"TF_CPP_MIN_LOG_LEVEL": "3"},
        )
        for precision in PRECISIONS
    }

    def speed(precision: str) -> float:
        time, memory[precision] = contenders[precision].window()
        return case.batch * case.steps / time

    windows = {precision: lambda precision=precision: speed(precision) for precision in PRECISIONS}
    try:
        for contender in contenders.values():  # all contenders build and trace at once
            contender.start_window()
        for contender in contenders.values():
            contender.end_window()
        return interleaved(windows, 1 if quick else ROUNDS), memory
    finally:
        for contender in contenders.values():
            contender.close()


if __name__ == "__main__":
    command.main(measure, processes=3)
