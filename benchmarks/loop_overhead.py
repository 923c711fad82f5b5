"""Cost of ddl's loop compared with the alternatives: python -m benchmarks.loop_overhead.

The networks are those of two tutorials, the MLP 784-128-dropout 0.2-10 and the CNN 3×3×32, 3×3×64,
maxpool, dropout 0.25, dense 128, dropout 0.5, dense 10, and `ddl.models.gpt` with two blocks, 128
wide, on 64 tokens out of 256. They train with Adam in float32 on examples in memory. The
alternatives are Keras's `fit` as the tutorials call it; `fit` with many steps per execution; and
Orbit's StandardTrainer, whose loop is a tf.while. On several devices `fit` runs one step per
execution, since Keras 3.15 fails with more there; the loop of TensorFlow's tutorial on custom
training, with a tf.function for each step, is a further alternative. The floor is the bare step in
a tf.while on one constant batch, with TensorFlow's fused Adam and without metrics. The floor that
reads is the same step on rows that it gathers in a random order, as ddl does. The GPT also runs
with XLA, and the faster tuned fit counts; on CPUs ddl uses XLA only on request.
"""

from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks.contenders import Case
from benchmarks.harness import Contender, Options, Report, Table, Target, spread

DDL, FLOOR, READING = "ddl", "floor", "floor that reads"
FIT, TUNED, TUTORIAL, ORBIT = OTHERS = ("Keras fit", "Keras fit, tuned", "tutorial's loop", "Orbit")
FUNCTIONS = {
    FIT: "by_fit",
    TUNED: "by_tuned_fit",
    TUTORIAL: "by_tutorial",
    ORBIT: "by_orbit",
    DDL: "by_ddl",
    FLOOR: "floor",
    READING: "reading_floor",
}
COMPILED = {f"{TUNED}, XLA": "by_compiled_fit", f"{DDL}, XLA": "by_ddl_compiled"}

CASES = {
    Case("MLP", 25, 200, 5): {FIT: 4.0, TUNED: 1.5, ORBIT: 1.5, FLOOR: 1.1},
    Case("MLP", 512, 11, 20): {FLOOR: 1.05},
    Case("CNN", 256, 5): {FLOOR: 1.05},
    Case("GPT", 32, 10, examples=640): {FIT: 1.0, TUNED: 1.0, ORBIT: 1.0, FLOOR: 1.05},
    Case("MLP", 64, 90, 6, replicas=2): {FIT: 3.0, TUTORIAL: 1.5, ORBIT: 1.5},
    Case("CNN", 256, 5, replicas=2): {},
}
"""Cases, with the least speed relative to another, or the largest time relative to the floor."""


def contenders(case: Case) -> dict[str, Contender]:
    """Returns the contenders of a case."""
    functions = FUNCTIONS | (COMPILED if case.network == "GPT" else {})
    return {
        name: Contender(f"benchmarks.contenders:{function}", case)
        for name, function in functions.items()
        if name not in ((TUTORIAL,) if case.replicas == 1 else (FLOOR, READING))
    }


def ratio(times: dict[str, np.ndarray], name: str) -> Any:
    """Returns ddl's speed / another's, the faster with or without XLA; ddl's time / a floor's."""
    if name not in times or DDL not in times:
        return "–"
    if name in (FLOOR, READING):
        return spread(times[DDL] / times[name])
    kinds = [times[kind] for kind in (name, f"{name}, XLA") if kind in times]
    return spread(min(kinds, key=np.median) / times[DDL])


def targets_of(case: Case, times: dict[str, np.ndarray]) -> list[Target]:
    """Returns the targets of a case whose contenders have run."""
    found = []
    for name, limit in CASES[case].items():
        value = ratio(times, name)
        if name == FLOOR and value != "–":
            found.append(Target(f"{case}: ddl's time / the floor's", value, limit, "at most"))
        elif value != "–":
            found.append(Target(f"{case}: ddl's speed / that of {name}", value, limit))
    return found


def measure(options: Options) -> Report:
    """Measures one case after the other."""
    found, targets, notes = {}, [], []
    for case in options.chosen(CASES):
        processes, rounds = (1, 1) if options.quick else (3, 2)
        found[case], failed = harness.compare(contenders(case), processes, rounds)
        notes += [f"{case}, {why}." for why in failed]
        targets += targets_of(case, found[case])
    compared = (*OTHERS, FLOOR, READING)
    ratios = [
        [str(case), *(ratio(times, name) for name in compared)] for case, times in found.items()
    ]
    times = [
        [name, *(spread(t[name], 1e3) if name in t else "–" for t in found.values())]
        for name in FUNCTIONS | COMPILED
    ]
    title = "ddl's speed / the others'; its time / the floors'"
    tables = [Table(title, ["", *compared], ratios)]
    tables += [Table("Milliseconds per update", ["", *map(str, found)], times)]
    return Report(tables, targets, notes)


if __name__ == "__main__":
    harness.main(measure)
