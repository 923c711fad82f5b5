"""Cost of ddl's loop compared with the alternatives: python -m benchmarks.loop_overhead.

The networks are those of two tutorials, the MLP 784-128-dropout 0.2-10 and the CNN 3×3×32, 3×3×64,
maxpool, dropout 0.25, dense 128, dropout 0.5, dense 10, and `ddl.models.gpt` with two blocks, 128
wide, on 64 tokens out of 256. They train with Adam in float32 on examples in memory. The
alternatives are Keras's `fit` as the tutorials call it; `fit` with many steps per execution; and
Orbit's StandardTrainer, whose loop is a tf.while. On several devices `fit` runs one step per
execution, since Keras 3.15 fails with more there; the loop of TensorFlow's tutorial on custom
training, with a tf.function for each step, is a further alternative. The floor is the bare step in
a tf.while on one constant batch, with TensorFlow's fused Adam and without metrics. The floor that
reads is the same step on rows that it gathers in a random order, as ddl does.

The MLPs and the GPT also run with XLA, and the faster tuned fit counts; on CPUs ddl uses XLA only
on request. Keras's `fit` on JAX, and a bare `jax.lax.scan` with optax on arrays on the device and
without metrics, are compared with ddl with XLA, since JAX compiles too. XLA's convolutions on CPUs
are several times slower than TensorFlow's, so the CNN runs without.
"""

from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks.cases import Case
from benchmarks.harness import Contender, Options, Report, Table, Target, spread

DDL, COMPILED = "ddl", "ddl, XLA"
FIT, TUNED, TUTORIAL, ORBIT = OTHERS = ("Keras fit", "Keras fit, tuned", "tutorial's loop", "Orbit")
TUNED_COMPILED = f"{TUNED}, XLA"
ON_JAX = JAX_FIT, JAX_SCAN = ("Keras fit, JAX", "JAX scan")
FLOORS = FLOOR, READING = ("floor", "floor that reads")
BOUNDS = (*FLOORS, JAX_SCAN)
FUNCTIONS = {
    FIT: "contenders:by_fit",
    TUNED: "contenders:by_tuned_fit",
    TUNED_COMPILED: "contenders:by_compiled_fit",
    TUTORIAL: "contenders:by_tutorial",
    ORBIT: "contenders:by_orbit",
    JAX_FIT: "on_jax:by_fit",
    DDL: "contenders:by_ddl",
    COMPILED: "contenders:by_ddl_compiled",
    FLOOR: "contenders:floor",
    READING: "contenders:reading_floor",
    JAX_SCAN: "on_jax:by_scan",
}

OF_MLP = {JAX_FIT: 1.1, JAX_SCAN: 1.1}
CASES = {
    Case("MLP", 25, 200, 5): {FIT: 4.0, TUNED: 1.5, ORBIT: 1.5, FLOOR: 1.1, **OF_MLP},
    Case("MLP", 256, 44, 10): OF_MLP,
    Case("MLP", 512, 22, 10): {FLOOR: 1.05, **OF_MLP},
    Case("CNN", 256, 5): {FLOOR: 1.05},
    Case("GPT", 32, 10, examples=640): {FIT: 1.0, TUNED: 1.0, ORBIT: 1.0, FLOOR: 1.05},
    Case("MLP", 64, 90, 6, replicas=2): {FIT: 3.0, TUTORIAL: 1.5, ORBIT: 1.5},
    Case("MLP", 64, 90, 6, replicas=4): {FIT: 3.0, TUTORIAL: 1.5, ORBIT: 1.5},
    Case("CNN", 256, 5, replicas=2): {},
}
"""Cases, with the least speed relative to another, or the largest time relative to a floor."""


def contenders(case: Case) -> dict[str, Contender]:
    """Returns the contenders of a case."""
    left_out: tuple[str, ...] = ON_JAX if case.network == "GPT" else ()
    if case.network == "CNN" or case.replicas > 1:
        left_out = (*ON_JAX, COMPILED, TUNED_COMPILED, *(FLOORS if case.replicas > 1 else ()))
    return {
        name: Contender(
            f"benchmarks.{function}", case, [{"KERAS_BACKEND": "jax"} if name in ON_JAX else {}]
        )
        for name, function in FUNCTIONS.items()
        if name not in left_out
    }


def ratio(times: dict[str, np.ndarray], name: str) -> Any:
    """Returns ddl's speed / another's, the faster with or without XLA; ddl's time / a bound's."""
    own = COMPILED if name in ON_JAX else DDL
    if not {name, own} <= times.keys():
        return "–"
    if name in BOUNDS:
        return spread(times[own] / times[name])
    kinds = [times[kind] for kind in (name, f"{name}, XLA") if kind in times]
    return spread(min(kinds, key=np.median) / times[own])


def targets_of(case: Case, times: dict[str, np.ndarray]) -> list[Target]:
    """Returns the targets of a case whose contenders have run."""
    found = []
    for name, limit in CASES[case].items():
        value = ratio(times, name)
        what = f"{case}: ddl's time / that of {name}"
        if name in BOUNDS and value != "–":
            found.append(Target(what, value, limit, "at most"))
        elif value != "–":
            found.append(Target(what.replace("time", "speed"), value, limit))
    return found


def measure(options: Options) -> Report:
    """Measures one case after the other."""
    found, targets, notes = {}, [], []
    for case in options.chosen(CASES):
        processes, rounds = (1, 1) if options.quick else (3, 2)
        found[case], failed = harness.compare(contenders(case), processes, rounds)
        notes += [f"{case}, {why}." for why in failed]
        targets += targets_of(case, found[case])
    compared = (*OTHERS, JAX_FIT, *BOUNDS)
    ratios = [
        [str(case), *(ratio(times, name) for name in compared)] for case, times in found.items()
    ]
    times = [
        [name, *(spread(t[name], 1e3) if name in t else "–" for t in found.values())]
        for name in FUNCTIONS
    ]
    title = "ddl's speed / the others'; its time / that of the floors and the scan"
    tables = [Table(title, ["", *compared], ratios)]
    tables += [Table("Milliseconds per update", ["", *map(str, found)], times)]
    return Report(tables, targets, notes)


if __name__ == "__main__":
    harness.main(measure)
