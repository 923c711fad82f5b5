"""The contract of imports: which room of ddl/ may import which, and the sizes of modules.

A room is a package or a module of ddl/. `python -m tests.test_rooms` prints the arrows between them
that the imports draw, as BUILD.md shows them.
"""

import ast
import graphlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import benchmarks
import ddl

PACKAGE = Path(ddl.__file__).parent
BENCHMARKS = Path(benchmarks.__file__).parent

# The base modules, of which the later may import the earlier.
GROUND_IN_ORDER = [
    *("errors", "choices", "output", "signals", "figures", "precision", "microbatch", "random"),
]
GROUND = set(GROUND_IN_ORDER)
_LEARNING = {"data", "layers", "metrics", "models", "tasks", "optimizers"}

# Each package with all that it may import: only packages that stand before it in this list.
MAY_IMPORT: dict[str, set[str]] = {
    "config": {"choices", "errors"},
    "distribution": GROUND,
    "layers": {"distribution"} | GROUND,
    "models": {"layers"} | GROUND,
    "metrics": GROUND,
    "tasks": {"layers", "metrics", "distribution"} | GROUND,
    "optimizers": {"distribution"} | GROUND,
    "data": {"distribution"} | GROUND,
    "step": {"data", "layers", "metrics", "optimizers", "tasks", "distribution"} | GROUND,
    "training": {"step", "distribution"} | _LEARNING | GROUND,
    "checkpoints": {"training", "step", "distribution"} | _LEARNING | GROUND,
    "run": {"checkpoints", "training", "step", "distribution", "config"} | _LEARNING | GROUND,
    "checking": {"run", "training", "distribution", "config"} | _LEARNING | GROUND,
    "cli": {"run", "config", "distribution"} | GROUND,
    "launcher": {"errors", "choices", "output"},
}
DOORS = {"__main__", "main", "launch", "check"}


def modules() -> Iterator[tuple[str, Path]]:
    """Each module with its room; the package's own __init__ has none."""
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts != ("__init__",):
            yield parts[0], path


def imported_rooms(path: Path) -> set[str]:
    parts = [name.split(".") for name in imported_modules(path) if name.startswith("ddl.")]
    return {room for _, room, *_ in parts} - {"__version__"}


def upward(room: str, path: Path) -> list[str]:
    """What the module imports and may not."""
    if room in DOORS:
        return [other for other in imported_rooms(path) if other in DOORS - {room}]
    if room in GROUND_IN_ORDER:
        allowed = set(GROUND_IN_ORDER[: GROUND_IN_ORDER.index(room)])
    else:
        allowed = MAY_IMPORT[room] | {room}
    return [other for other in imported_rooms(path) if other not in allowed]


def arrows() -> dict[str, list[str]]:
    """The rooms that each room imports, those of the ground left out."""
    found: dict[str, set[str]] = {}
    for room, path in modules():
        found.setdefault(room, set()).update(imported_rooms(path))
    return {room: sorted(found[room] - {room} - GROUND) for room in found}


def test_no_module_imports_upwards():
    found = [
        f"{path.relative_to(PACKAGE)} imports {upward(room, path)}"
        for room, path in modules()
        if upward(room, path)
    ]
    assert not found, found


def test_every_room_and_module_has_a_place():
    rooms = {room for room, _ in modules()}
    assert rooms == MAY_IMPORT.keys() | set(GROUND_IN_ORDER) | DOORS
    assert len(rooms) <= 27


def test_build_md_shows_the_rooms_and_their_arrows():
    shown = {}
    rooms = (PACKAGE.parent / "BUILD.md").read_text().split("## ")[1]
    for line in rooms.splitlines():
        if row := re.match(r"\| (`[a-z_`,./ ]+`) \| .* \| ([a-z_, ]*)\|$", line):
            for room in re.findall(r"`(\w+)(?:/|\.py)`", row[1]):
                shown[room] = re.findall(r"\w+", row[2])
    assert shown == {room: found for room, found in arrows().items() if room not in GROUND}


def test_no_module_outgrows_500_lines():
    long = {
        str(path.relative_to(PACKAGE)): lines
        for path in PACKAGE.rglob("*.py")
        if (lines := len(path.read_text().splitlines())) > 500
    }
    assert not long, long


def imported_modules(path: Path) -> Iterator[str]:
    """The modules that a module imports, also within functions, and what may be modules."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield from [str(node.module), *(f"{node.module}.{name.name}" for name in node.names)]
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names)


@pytest.mark.parametrize("folder", [PACKAGE, BENCHMARKS], ids=lambda folder: folder.name)
def test_no_modules_import_each_other(folder):
    paths = {
        ".".join(path.relative_to(folder.parent).with_suffix("").parts): path
        for path in folder.rglob("*.py")
        if path.name != "__init__.py" and "peers" not in path.parts
    }
    graph = {name: paths.keys() & imported_modules(path) for name, path in paths.items()}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError with the circle


if __name__ == "__main__":
    for name, imported in arrows().items():
        print(f"{name} → {', '.join(imported) or 'ground'}")
