"""Memory and time of parts that are computed again: python -m benchmarks.remat.

Three networks train on one device in float32: 16 residual blocks of a perceptron with 512 units,
each a normalization, a dense layer with GELU and an addition, on batches of 2,048; a residual
network for images of 32 × 32 pixels with 12 blocks, on batches of 32; and a transformer with 6
blocks of width 256, on 8 sequences of 128 tokens. Each trains as it is, and with `Remat`: every
block, two blocks as one part, and every second block.

Each contender has fresh processes, which wait while another one computes. Memory is the growth of
the process's peak from before the first update to after it and the ones that follow, once they are
traced. The prediction is that of `--dry_run`: gradients, slots and activations. Time is a ratio to
the same network without `Remat` in the same round. The targets: every block takes at most 1.35 of
the time, and less than 0.6 of the memory.
"""

import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np

import ddl
from benchmarks import command
from benchmarks.memory import megabytes
from benchmarks.repeats import interleaved, over_processes, ratio, rotated, seconds
from benchmarks.report import Bar, Report, Table, plot_of
from benchmarks.turns import Contender, Turns
from ddl.step.observing import observed_by
from ddl.step.remat.activations import Activations

UPDATES = 3  # in a window
MOST_TIME, MOST_MEMORY = 1.35, 0.6
PLAIN, EVERY_BLOCK = "without", "every block"
RULES: dict[str, dict[str, Any] | None] = {
    PLAIN: None,
    EVERY_BLOCK: {},
    "two blocks as one": {"together": 2},
    "every second block": {"every": 2},
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A network and a rule, by their names, and the number of blocks and of examples."""

    network: str
    rule: str
    blocks: int
    batch: int


def perceptron(case: Case) -> tuple[ddl.Task, Any]:
    """Returns the task of the perceptron, and its data."""
    inputs = keras.Input((64,))
    x = keras.layers.Dense(512)(inputs)
    for number in range(case.blocks):
        branch = keras.layers.LayerNormalization(name=f"block{number}_norm")(x)
        branch = keras.layers.Dense(512, "gelu", name=f"block{number}_dense")(branch)
        x = keras.layers.Add(name=f"block{number}_add")([x, branch])
    random = np.random.default_rng(0)
    data = random.normal(size=(case.batch, 64)).astype("f4"), random.integers(0, 10, case.batch)
    return ddl.Classification(keras.Model(inputs, keras.layers.Dense(10)(x))), data


def images(case: Case) -> tuple[ddl.Task, Any]:
    """Returns the task of the residual network, and its data."""
    model = ddl.models.resnet(
        (32, 32, 3), 10, blocks=[case.blocks // 3] * 3, width=32, bottleneck=False, stem="small"
    )
    random = np.random.default_rng(0)
    data = random.integers(0, 256, (case.batch, 32, 32, 3)).astype("u1")
    return ddl.Classification(model), (data, random.integers(0, 10, case.batch))


def transformer(case: Case) -> tuple[ddl.Task, Any]:
    """Returns the task of the transformer, and its data."""
    model = ddl.models.gpt(256, 128, width=256, heads=4, blocks=case.blocks)
    tokens = np.random.default_rng(0).integers(0, 256, (case.batch, 129))
    data = {"token": tokens[:, :-1], "next_token": tokens[:, 1:]}
    return ddl.LanguageModel(model), data


# Name of the function, pattern of the layers of the blocks, blocks, examples.
NETWORKS: dict[str, tuple[Callable[..., Any], str, int, int]] = {
    "perceptron": (perceptron, "block*", 16, 2048),
    "images": (images, "stage*", 12, 32),
    "transformer": (transformer, "block_*", 6, 8),
}


def contender(case: Case, turns: Turns) -> None:
    """Reports seconds per update, and the megabytes of growth and of the prediction."""
    build, pattern, _, _ = NETWORKS[case.network]
    rule = RULES[case.rule]
    keras.utils.set_random_seed(0)
    task, data = build(case)
    trainer = ddl.Trainer(
        task,
        keras.optimizers.SGD(0.001, momentum=0.9),
        data,
        global_batch_size=case.batch,
        remat=None if rule is None else ddl.Remat(pattern, **rule),
    )
    with observed_by(activations := Activations()):
        trainer.trace()
    weights = 4 * sum(int(np.prod(v.shape)) for v in task.model.trainable_variables)
    predicted = ((activations.bytes or 0) + weights) / 2**20  # gradients
    before = megabytes(os.getpid())["present"]
    while turns.wait():
        taken = seconds(lambda: trainer.train(UPDATES, progress=False)) / UPDATES
        grown = megabytes(os.getpid())["peak"] - before
        turns.report((taken, grown, predicted))


def run_network(name: str, processes: int, rounds: int, quick: bool) -> dict[str, np.ndarray]:
    """Returns ms per update, growth and prediction in MB of each rule, [processes, 3]."""
    _, _, blocks, batch = NETWORKS[name]
    found: dict[str, list[list[float]]] = {rule: [] for rule in RULES}
    for number in range(processes):
        contenders = {
            rule: Contender(
                "benchmarks.remat:contender",
                [Case(name, rule, 3 if quick else blocks, 2 if quick else batch)],
                {},
            )
            for rule in rotated(RULES, number)
        }
        try:
            for one in contenders.values():
                one.window()  # the first may still allocate memory
            last: dict[str, Any] = {}

            def window(rule: str, of: Any = contenders, last: Any = last) -> Callable[[], float]:
                def measured() -> float:
                    last[rule] = of[rule].window()
                    return last[rule][0]

                return measured

            times = interleaved({rule: window(rule) for rule in contenders}, rounds)
            for rule, values in times.items():
                found[rule].append([float(np.median(values)) * 1e3, *last[rule][1:]])
        finally:
            for one in contenders.values():
                one.close()
    return {rule: np.array(values) for rule, values in found.items()}


def reported(found: dict[str, dict[str, np.ndarray]], checks: bool) -> Report:
    """Returns the report of the networks that were measured."""
    rows, bars = [], []
    for network, of in found.items():
        plain = of[PLAIN]
        for rule, values in of.items():
            time = ratio(values[:, 0] / plain[:, 0])
            memory = ratio(values[:, 1] / np.maximum(plain[:, 1], 1))
            figures = [over_processes(values[:, column]) for column in (1, 2, 0)]
            rows.append([f"{network}, {rule}", memory, time, *figures])
            if rule == EVERY_BLOCK and checks:
                bars += [
                    Bar(f"{network}: time with every block / without", time, MOST_TIME, "at most"),
                    Bar(
                        f"{network}: memory with every block / without",
                        memory,
                        MOST_MEMORY,
                        "at most",
                    ),
                ]
    columns = ["", "memory / without", "time / without", "MB", "MB predicted", "ms per update"]
    table = Table("Memory and time of an update", columns, rows)
    return Report([table], bars, [plot_of(table, columns[1:3], "ratio")])


def measure(quick: bool, only: str) -> Iterator[Report]:
    """Measures one network after the other; yields what is measured so far."""
    found = {}
    for name in NETWORKS:
        if only not in name:
            continue
        found[name] = run_network(name, 1 if quick else 3, 1 if quick else 5, quick)
        yield reported(found, checks=not quick)


if __name__ == "__main__":
    command.main(measure, has_cases=True)
