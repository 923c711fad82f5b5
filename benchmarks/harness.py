"""The harness of the benchmarks: contenders in fresh processes, reports, and their command.

A benchmark is a module with a function `measure` that takes `Options` and returns a `Report`; the
module ends with `harness.main(measure)`. Its contenders are functions of a case: each builds what
it measures, and returns a window, a function that works for about a second and returns a figure,
such as seconds an update.

Two processes of one program differ by up to 15%, mostly by where their memory comes to lie, so each
contender has several fresh processes. They stay alive side by side while one of them computes.
"""

import argparse
import contextlib
import dataclasses
import datetime
import importlib
import importlib.metadata
import json
import math
import multiprocessing
import os
import platform
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PEERS = ROOT / "benchmarks" / "peers"
PACKAGES = ("ddl", "tensorflow", "keras", "numpy")

_TIMEOUT_SECONDS = 900  # only ends what hangs

Spread: TypeAlias = list[float]
"""Median, lowest and highest of what several processes, or rounds, found."""
Cell: TypeAlias = str | int | float | Spread
Window: TypeAlias = Callable[[], float]
"""A call that measures for about a second, and returns a figure."""


class Failed(Exception):
    """A contender cannot run; the message says why."""


def find_peer(name: str) -> None:
    """Makes a package that ddl is compared with importable, or raises Failed."""
    if not (PEERS / name).exists():
        raise Failed("not installed; `make benchmarks/peers` installs it")
    sys.path.append(str(PEERS))


@dataclasses.dataclass(frozen=True)
class Table:
    """A table with column titles; the first cell names its row."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]


@dataclasses.dataclass(frozen=True)
class Target:
    """A target and its measurement: `value` must be at least, or at most, `limit`."""

    what: str
    value: float | Spread
    limit: float
    kind: Literal["at least", "at most"] = "at least"

    @property
    def verdict(self) -> Literal["met", "missed", "open"]:
        """Whether the value meets the target; "open" if the limit lies within its interval."""
        ends = self.value[1:] if isinstance(self.value, list) else [self.value]
        least = self.kind == "at least"
        met = [end >= self.limit if least else end <= self.limit for end in ends]
        return "met" if all(met) else "open" if any(met) else "missed"


@dataclasses.dataclass(frozen=True)
class Report:
    """The results of a benchmark."""

    tables: Sequence[Table]
    targets: Sequence[Target] = ()
    notes: Sequence[str] = ()


@dataclasses.dataclass(frozen=True)
class Options:
    """The flags of a benchmark.

    Attributes:
      quick: Only check that the benchmark works; the figures mean nothing.
      only: Text that the names of the cases must contain; several, separated by ";".
    """

    quick: bool = False
    only: str = ""

    def chosen(self, cases: Iterable[Any]) -> list[Any]:
        """Returns the cases whose text contains `only`."""
        parts = [part.strip() for part in self.only.split(";")]
        found = [case for case in cases if any(part in str(case) for part in parts)]
        if not found:
            raise SystemExit(f"No case contains {self.only!r}: {', '.join(map(str, cases))}.")
        return found


# ------------------------------------------------------------ contenders


@dataclasses.dataclass(frozen=True)
class Contender:
    """What runs in processes of its own.

    Attributes:
      function: "module:name" of a function that takes `case` and returns a window.
      case: Argument of the function.
      workers: Environment variables of each process. All compute at once, and the largest figure
        counts. CORE pins a process to a core; KERAS_BACKEND is a peer that Keras runs on.
    """

    function: str
    case: Any
    workers: Sequence[Mapping[str, str]] = ({},)


class _Running:
    """The processes of a contender."""

    def __init__(self, contender: Contender) -> None:
        context = multiprocessing.get_context("spawn")
        self._connections, self._processes = [], []
        for environment in contender.workers:
            ours, theirs = multiprocessing.Pipe()
            given = (contender.function, contender.case, dict(environment), theirs)
            process = context.Process(target=_serve, args=given, daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    def figure(self) -> float:
        """Returns the largest figure that the processes send next; 0 when they are built."""
        values: list[Any] = []
        for connection in self._connections:
            try:
                answers = connection.poll(_TIMEOUT_SECONDS)
                values.append(connection.recv() if answers else "no answer in time")
            except (EOFError, OSError):
                values.append("its process died")
        for value in values:
            if isinstance(value, str):
                raise Failed(value)
        return max(values)

    def window(self) -> float:
        """Runs a window in all processes at once."""
        for connection in self._connections:
            with contextlib.suppress(OSError):  # if the process died, `figure` raises
                connection.send(True)
        return self.figure()

    def close(self) -> None:
        """Kills the processes."""
        for process in self._processes:
            process.kill()
            process.join()


def _serve(function: str, case: Any, environment: dict[str, str], connection: Any) -> None:
    os.environ.update({"TF_CPP_MIN_LOG_LEVEL": "3"} | environment)
    if "CORE" in environment:
        os.sched_setaffinity(0, {int(environment["CORE"])})
    try:
        if "KERAS_BACKEND" in environment:
            find_peer(environment["KERAS_BACKEND"])
        module, _, name = function.partition(":")
        window = getattr(importlib.import_module(module), name)(case)
        window()  # traces
        value: Any = 0.0
        while True:
            connection.send(value)
            connection.recv()
            value = window()
    except (EOFError, BrokenPipeError):
        return
    except Exception as error:
        if not isinstance(error, Failed):
            traceback.print_exc()
        text = str(error).splitlines()[0][:200] if str(error) else ""
        connection.send(text if isinstance(error, Failed) else f"{type(error).__name__}: {text}")


def compare(
    contenders: Mapping[str, Contender], processes: int = 3, rounds: int = 3
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Measures contenders in several fresh processes each.

    Returns:
      By name the median figure of each process, [processes], and a note for each contender that
      failed, which is left out.
    """
    found: dict[str, list[float]] = {name: [] for name in contenders}
    failed: dict[str, str] = {}
    for number in range(processes):
        running = {name: _Running(c) for name, c in contenders.items() if name not in failed}
        try:
            windows = {}
            for name, each in running.items():
                try:
                    each.figure()
                    windows[name] = each.window
                except Failed as failure:
                    failed[name] = str(failure)
            for name, figures in interleaved(windows, rounds, number).items():
                found[name].append(float(np.median(figures)))
        finally:
            for each in running.values():
                each.close()
    medians = {name: np.array(each) for name, each in found.items() if name not in failed}
    return medians, [f"{name}: {why}" for name, why in failed.items()]


def interleaved(
    contenders: Mapping[str, Callable[[], float]], rounds: int, first: int = 0
) -> dict[str, np.ndarray]:
    """Calls each contender once in a round, in an order that rotates; returns [rounds] by name."""
    names = list(contenders)
    found: dict[str, list[float]] = {name: [] for name in names}
    for number in range(first, first + rounds):
        turn = number % max(len(names), 1)
        for name in names[turn:] + names[:turn]:
            found[name].append(contenders[name]())
    return {name: np.array(values) for name, values in found.items()}


def seconds(call: Callable[[], object], parts: int = 1) -> float:
    """Returns the seconds that a call takes, over `parts`."""
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) / parts


def peak_memory(command: Sequence[str], **environment: str) -> float:
    """Runs a command, which must succeed; returns the peak of its resident memory in MiB."""
    process = subprocess.Popen(command, env=os.environ | environment, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if status:
        raise RuntimeError(f"{command[:3]} ended with status {process.returncode}.")
    return usage.ru_maxrss / 1024


def timed(call: Callable[[], object], parts: int = 1) -> Callable[[], float]:
    """Returns a window: the seconds of a call, over `parts`."""
    return lambda: seconds(call, parts)


def spread(values: Any, unit: float = 1) -> Spread:
    """Returns median, lowest and highest, times `unit`. Of ratios, each is of one process."""
    values = np.asarray(values, float) * unit
    return [float(np.median(values)), float(values.min()), float(values.max())]


# ------------------------------------------------------------ the command


def main(measure: Callable[[Options], Report]) -> None:
    """Runs a benchmark as its module's command: writes its result, and prints it."""
    module = measure.__globals__["__spec__"].name
    title, text = title_and_text(measure.__globals__["__doc__"])
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=title)
    add_flags(parser)
    flags = parser.parse_args()
    start = time.perf_counter()
    report = measure(Options(flags.quick, flags.only))
    command = f"python -m benchmarks {module.rpartition('.')[2]}"
    result = {
        "name": "_".join([module.rpartition(".")[2], *re.findall(r"\w+", flags.only)]),
        "title": f"{title}: {flags.only}" if flags.only else title,
        "text": text,
        "command": command + (f" --only='{flags.only}'" if flags.only else ""),
        "quick": flags.quick,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "minutes": (time.perf_counter() - start) / 60,
        "commit": commit(),
        "machine": machine(),
        "versions": versions(),
        **dataclasses.asdict(report),
    }
    folder = results_folder(flags)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{result['name']}.json"
    path.write_text(json.dumps(_rounded(result), indent=1, ensure_ascii=False) + "\n")
    for table in [*report.tables, targets_table(report.targets)]:
        print(f"\n{table.title}\n{markdown(table)}")
    print(*report.notes, f"Wrote {path}.", sep="\n")
    # Deleting a data set waits up to a minute for its tuner, so the process ends without it.
    sys.stdout.flush()
    os._exit(0)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that all benchmarks have."""
    parser.add_argument("--results", type=Path, help=f"folder of the results [{RESULTS}]")
    parser.add_argument("--only", default="", help="texts of cases, separated by ';'")
    parser.add_argument("--quick", action="store_true", help="only check that it works")


def results_folder(flags: argparse.Namespace) -> Path:
    """Returns the folder of the results; those of a quick run are no results."""
    return flags.results or (ROOT / "runs" / "quick_benchmarks" if flags.quick else RESULTS)


def title_and_text(docstring: str) -> tuple[str, str]:
    """Returns a docstring's first line without the command, and the rest, unwrapped."""
    first, _, rest = docstring.strip().partition("\n")
    paragraphs = [" ".join(paragraph.split()) for paragraph in rest.split("\n\n")]
    return first.partition(": python -m")[0].rstrip("."), "\n\n".join(filter(None, paragraphs))


def machine() -> str:
    """Returns this process's cores, the processor, memory, GPUs and system."""
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*:\s*(.*)", info.read_text() if info.exists() else "")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = f"{len(os.sched_getaffinity(0))} cores of {names[0] if names else platform.machine()}"
    system = f"{platform.system()} {platform.release().partition('-')[0]}"
    return ", ".join([cores, f"{memory:.1f} GiB", *gpus(), system])


def commit() -> str:
    """Returns the commit of the checkout, in eight digits; "" without git."""
    command = ["git", "rev-parse", "--short=8", "HEAD"]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        return found.stdout.strip()
    return ""


def gpus() -> list[str]:
    """Returns the names of this machine's NVIDIA GPUs."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split(
            "\n"
        )[:-1]
    return []


def versions() -> str:
    """Returns the versions of Python, ddl and the main dependencies."""
    names = [f"{name} {importlib.metadata.version(name)}" for name in PACKAGES]
    return ", ".join([f"Python {platform.python_version()}", *names])


def _rounded(value: Any) -> Any:
    """Rounds all numbers to five digits."""
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(each) for each in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


# ------------------------------------------------------------ tables as text


def text_of(cell: Cell) -> str:
    """Formats a cell: three significant digits, and the interval of a spread in brackets."""
    if isinstance(cell, list):
        return f"{text_of(cell[0])} ({text_of(cell[1])}–{text_of(cell[2])})"
    if isinstance(cell, float):
        if cell == 0 or not math.isfinite(cell):
            return f"{cell:g}"
        decimals = 2 - math.floor(math.log10(abs(cell)))
        return f"{cell:,.{max(decimals, 0)}f}" if decimals < 7 else f"{cell:.0e}"
    return f"{cell:,}" if isinstance(cell, int) else cell


def targets_table(targets: Sequence[Target]) -> Table:
    """Builds a table with a row for each target."""
    signs = {"at least": "≥", "at most": "≤"}
    rows = [[t.what, f"{signs[t.kind]} {t.limit:g}", t.value, t.verdict] for t in targets]
    return Table("Targets", ["figure", "target", "measured", ""], rows)


def markdown(table: Table) -> str:
    """Returns a table in Markdown."""
    lines = [table.columns, ["---", *["---:"] * (len(table.columns) - 1)], *table.rows]
    return "\n".join("| " + " | ".join(map(text_of, line)) + " |" for line in lines)
