"""The values of a replayed update, as tables and arrays. Imports no TensorFlow."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ddl.checking.recording import OF_ROWS, Key, Part
from ddl.replay.recorded import Recorded

SHOWN: Mapping[str, tuple[str, ...]] = {
    "indices": (),
    "examples": ("rows",),
    "activations": ("draw", "layer", "loss", "weight", "metric"),
    "gradients": ("own gradients", "gradients", "applied gradients", "clipped gradients"),
    "update": (),
}
"""Values that can be asked for, with the recorded stages of each."""

_TITLES = {
    "rows": "examples",
    "draw": "random numbers",
    "layer": "outputs of layers",
    "loss": "losses of the examples",
    "weight": "weights of the examples",
    "metric": "metrics of the examples",
    "own gradients": "gradients before the reduce",
    "gradients": "reduced gradients",
    "applied gradients": "gradients that are applied, unclipped",
    "clipped gradients": "gradients that the optimizer is given",
}
_STATE = ("weights", "slots", "statistics", "averages", "own variables")


def arrays_of(recorded: Recorded, step: int, shown: Sequence[str]) -> dict[str, np.ndarray]:
    """Returns what is asked for as arrays, by kind and name, such as "layer/cnn".

    Rows are in the order of the global batch. Gradients before the reduce have the replica and the
    first row in their names. The update of a variable is its new value minus the old one.

    Args:
      recorded: The values.
      step: The update.
      shown: Keys of `SHOWN`.
    """
    made: dict[str, np.ndarray] = {}
    values = recorded.recording.values
    if "indices" in shown:
        for name, found in recorded.indices.get(step, {}).items():
            if found is not None:
                made[f"indices/{name}".rstrip("/")] = found["index"]
                made[f"weights of rows/{name}".rstrip("/")] = found["weight"]
    for kind in shown:
        for stage in SHOWN[kind]:
            for key, parts in _of_stage(values, step, stage):
                for suffix, array in _joined(key, parts):
                    made[_free(made, f"{stage}/{key.name}{suffix}")] = array
    if "update" in shown:
        for stage in _STATE:
            # By position too: two models may have variables of one path.
            before = {
                (key.position, key.name): parts for key, parts in _of_stage(values, step - 1, stage)
            }
            for key, parts in _of_stage(values, step, stage):
                new, old = parts[0].value, before[key.position, key.name][0].value
                if new.dtype.kind not in "biu":
                    made[_free(made, f"update/{stage}/{key.name}")] = new - old
    return made


def tables(recorded: Recorded, step: int, shown: Sequence[str]) -> Iterator[str]:
    """Yields lines that show what is asked for: indices, and the norms of all others.

    The arguments are those of `arrays_of`.
    """
    if "indices" in shown:
        for name, found in recorded.indices.get(step, {}).items():
            yield from _indices(name, found)
    for kind in shown:
        arrays = arrays_of(recorded, step, [kind])
        groups: dict[str, dict[str, np.ndarray]] = {}
        for name, array in arrays.items():
            stage = name.partition("/")[0]
            if kind == "update":
                stage = "/".join(name.split("/")[:2])
            if kind != "indices":
                groups.setdefault(stage, {})[name.removeprefix(f"{stage}/")] = array
        for stage, found_arrays in groups.items():
            yield ""
            title = _TITLES.get(stage, stage.replace("update/", "change of the "))
            yield f"{title:44} {'shape':>18} {'norm':>12} {'mean':>12} {'largest':>12}"
            for name, array in found_arrays.items():
                yield _line(name, array)


def _indices(name: str, found: Mapping[str, np.ndarray] | None) -> Iterator[str]:
    yield ""
    of = f" of the source {name}" if name else ""
    if found is None:
        yield f"The examples{of} have no indices: the source reads in an order of its own."
        return
    padding = int(np.sum(found["weight"] == 0))
    yield f"indices of the {len(found['index'])} rows{of}" + (
        f", the last {padding} are padding" if padding else ""
    )
    for first in range(0, len(found["index"]), 12):
        yield "  " + " ".join(f"{index:>8}" for index in found["index"][first : first + 12])


def _line(name: str, array: np.ndarray) -> str:
    shape = "×".join(map(str, array.shape)) or "1"
    if array.dtype.kind not in "biuf":
        return f"  {name:42.42} {shape:>18} {array.dtype!s:>12}"
    wide = array.astype(np.float64)
    largest = float(np.abs(wide).max(initial=0.0))
    mean = float(wide.mean()) if wide.size else 0.0
    norm = float(np.linalg.norm(wide.ravel()))
    return f"  {name:42} {shape:>18} {norm:>12.6g} {mean:>12.4g} {largest:>12.6g}"


def _of_stage(
    values: Mapping[Key, Sequence[Part]], step: int, stage: str
) -> list[tuple[Key, Sequence[Part]]]:
    found = [(key, parts) for key, parts in values.items() if key[0] == step and key.stage == stage]
    return sorted(found, key=lambda each: each[0][:4])


def _joined(key: Key, parts: Sequence[Part]) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the parts of a value: joined if they are rows, one if all replicas have the same."""
    ordered = sorted(parts, key=lambda part: (part.first_row, part.replica))
    shapes = {part.value.shape[1:] for part in ordered}
    if key.stage == "own gradients" and len(ordered) > 1:
        for part in ordered:
            yield f" (replica {part.replica}, from row {part.first_row})", part.value
    elif key.stage in OF_ROWS | {"draw"} and ordered[0].value.ndim and len(shapes) == 1:
        yield "", np.concatenate([part.value for part in ordered])
    else:
        yield "", ordered[0].value


def _free(made: Mapping[str, np.ndarray], name: str) -> str:
    """Returns a name that is not in use yet: a layer may be called several times."""
    number, free = 1, name
    while free in made:
        number += 1
        free = f"{name} ({number})"
    return free
