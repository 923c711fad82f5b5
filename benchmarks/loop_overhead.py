"""Cost of ddl's loop compared with the alternatives: python -m benchmarks.loop_overhead.

The networks are those of two tutorials, the MLP 784-128-dropout 0.2-10 and the CNN 3×3×32, 3×3×64,
maxpool, dropout 0.25, dense 128, dropout 0.5, dense 10, and `ddl.models.gpt` with two blocks, 128
wide, on 64 tokens out of 256. They train with Adam in float32 on examples in memory, on one device
(`benchmarks.replicas`: on several). The alternatives are Keras's `fit` as the tutorials call it;
`fit` with many steps per execution; and Orbit's StandardTrainer, whose loop is a tf.while. The
floor is the bare step in a tf.while on one constant batch, with TensorFlow's fused Adam and without
metrics. The floor that reads, for the MLPs, is the same step on rows that it gathers in a random
order, as ddl does. Beyond these bounds ddl draws Dropout by the rows' places in the global batch,
and sums loss and accuracy in float64.

The GPT's tuned fit also runs with XLA; with the MLPs `fit` is several times slower so. Keras's
`fit` on JAX, and a bare `jax.lax.scan` with optax on arrays on the device and without metrics,
compile always. Beside these, ddl and `fit` count by their faster way, with or without XLA; beside
all others ddl runs as it does by default, on CPUs without XLA. XLA's convolutions on CPUs are
several times slower than TensorFlow's, so the CNN runs without.
"""

from collections.abc import Container, Mapping
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
    Case("MLP", 25, 200, 5): {FIT: 4.0, TUNED: 1.5, ORBIT: 1.5, FLOOR: 1.05, **OF_MLP},
    Case("MLP", 256, 44, 10): OF_MLP,
    Case("MLP", 512, 22, 10): {FLOOR: 1.05, **OF_MLP},
    Case("CNN", 256, 5): {FLOOR: 1.05},
    Case("GPT", 32, 10, examples=640): {FIT: 1.0, TUNED: 1.0, ORBIT: 1.0, FLOOR: 1.05},
}
"""Cases, with the least speed relative to another, or the largest time relative to a floor."""


LEFT_OUT = {
    "MLP": (TUTORIAL, TUNED_COMPILED),
    "CNN": (TUTORIAL, TUNED_COMPILED, COMPILED, READING, *ON_JAX),
    "GPT": (TUTORIAL, READING, *ON_JAX),
}
"""Contenders that do not run, by network; on one device the tutorial's loop is as fast as `fit`."""


def contenders(case: Case, left_out: Container[str]) -> dict[str, Contender]:
    """Returns the contenders of a case."""
    return {
        name: Contender(
            f"benchmarks.{function}", case, [{"KERAS_BACKEND": "jax"} if name in ON_JAX else {}]
        )
        for name, function in FUNCTIONS.items()
        if name not in left_out
    }


def ratio(times: dict[str, np.ndarray], name: str) -> Any:
    """Returns ddl's speed / another's, or ddl's time / a bound's.

    Where the other compiles, each counts by its faster way, with or without XLA.
    """
    kinds = [kind for kind in (name, f"{name}, XLA") if kind in times]
    own = [DDL, COMPILED] if name in ON_JAX or len(kinds) > 1 else [DDL]
    own = [kind for kind in own if kind in times]
    if not (kinds and own):
        return "–"
    ours, theirs = (min((times[kind] for kind in of), key=np.median) for of in (own, kinds))
    return spread(ours / theirs if name in BOUNDS else theirs / ours)


def targets_of(
    case: Case, limits: Mapping[str, float], times: dict[str, np.ndarray]
) -> list[Target]:
    """Returns the targets of a case whose contenders have run.

    Args:
      case: The case.
      limits: The least speed relative to another, or the largest time relative to a bound.
      times: By contender, [processes].
    """
    found = []
    for name, limit in limits.items():
        value = ratio(times, name)
        what = f"{case}: ddl's time / that of {name}"
        if name in BOUNDS and value != "–":
            found.append(Target(what, value, limit, "at most"))
        elif value != "–":
            found.append(Target(what.replace("time", "speed"), value, limit))
    return found


def compared(
    cases: Mapping[Case, Mapping[str, float]],
    options: Options,
    left_out: Mapping[str, Container[str]],
    title: str,
) -> Report:
    """Measures one case after the other.

    Args:
      cases: The cases, with the limits of `targets_of`.
      options: The flags.
      left_out: Contenders that do not run, by network.
      title: Title of the table of ratios.
    """
    found, targets, notes = {}, [], []
    for case in options.chosen(cases):
        processes, rounds = (1, 1) if options.quick else (3, 5)
        running = contenders(case, left_out[case.network])
        found[case], failed = harness.compare(running, processes, rounds)
        notes += [f"{case}, {why}." for why in failed]
        targets += targets_of(case, cases[case], found[case])
    ran = [name for name in FUNCTIONS if any(name in times for times in found.values())]
    others = [name for name in ran if name not in (DDL, COMPILED, TUNED_COMPILED)]
    ratios = [
        [str(case), *(ratio(times, name) for name in others)] for case, times in found.items()
    ]
    times = [
        [name, *(spread(t[name], 1e3) if name in t else "–" for t in found.values())]
        for name in ran
    ]
    tables = [Table(title, ["", *others], ratios)]
    tables += [Table("Milliseconds per update", ["", *map(str, found)], times)]
    return Report(tables, targets, notes)


def measure(options: Options) -> Report:
    """Measures all networks on one device."""
    title = "ddl's speed / the others'; its time / that of the floors and the scan"
    return compared(CASES, options, LEFT_OUT, title)


if __name__ == "__main__":
    harness.main(measure)
