"""Shares of the kernels of a contender in the time of its updates, on a CPU.

`python -m benchmarks.kernel_shares gpt_cpu ddl_alone` profiles a window of a contender of a
benchmark with TensorFlow's profiler: each type of operation, its milliseconds and how often it runs
in an update, and its share of the time of all kernels. Kernels that run at the same time count
each. A benchmark with several cases takes the arguments of its case, such as
`large_embeddings ddl_alone 2000 200`.
"""

import collections
import importlib
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

_MOST_ROWS = 30
_KERNEL = re.compile(r"[^:]+:(?!__)(\w+)")  # "node:type"; a function, which holds kernels, has "__"
_PRODUCTS = ("MatMul", "Einsum", "Conv2D")


class Profiled:
    """Turns of a contender, of which the third window is profiled."""

    def __init__(self) -> None:
        self.milliseconds: collections.Counter[str] = collections.Counter()
        self.runs: collections.Counter[str] = collections.Counter()

    def take(self, window: Callable[[], object], updates: int) -> None:
        """Runs three windows, and keeps the kernels of the last one, by update."""
        import tensorflow as tf

        window()
        window()
        with tempfile.TemporaryDirectory() as folder:
            tf.profiler.experimental.start(folder)
            window()
            tf.profiler.experimental.stop()
            for kind, picoseconds in _kernels(Path(folder)):
                self.milliseconds[kind] += picoseconds / 1e9 / updates
                self.runs[kind] += 1 / updates


def _kernels(folder: Path) -> Iterator[tuple[str, int]]:
    """Returns type and picoseconds of each operation that the profiler saw on the CPU."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    for path in folder.rglob("*.xplane.pb"):
        space = xplane_pb2.XSpace.FromString(path.read_bytes())
        for plane in space.planes:
            names = {number: event.name for number, event in plane.event_metadata.items()}
            for line in plane.lines:
                for event in line.events:
                    if found := _KERNEL.fullmatch(names[event.metadata_id]):
                        yield found[1], event.duration_ps


def main(benchmark: str, contender: str, *case: str) -> None:
    """Profiles a contender and prints the table."""
    module = importlib.import_module(f"benchmarks.{benchmark}")
    profiled = Profiled()
    getattr(module, contender)(module.Case(*map(int, case or ("20",))), profiled)
    total = sum(profiled.milliseconds.values())
    for kind, each in profiled.milliseconds.most_common(_MOST_ROWS):
        print(f"{kind:40}{each:9.4f} ms {profiled.runs[kind]:8.1f} times {each / total:6.1%}")
    products = sum(
        each for kind, each in profiled.milliseconds.items() if any(p in kind for p in _PRODUCTS)
    )
    print(f"matrix products and convolutions: {products / total:.1%} of {total:.3f} ms")


if __name__ == "__main__":
    main(*sys.argv[1:])
