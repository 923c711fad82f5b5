"""The command of each benchmark: its flags, its result with machine and versions, its picture.

A benchmark is a module with a function `measure(quick)` that returns a `Report`, and ends with
`command.main(measure)`. Its command prints the report and writes two files to the results folder:
NAME.json, with the machine, the versions and the date, and the picture NAME.png. `benchmarks.page`
builds the page from the results of all benchmarks.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks import page
from benchmarks.report import RESULTS, Report

_PACKAGES = ("tensorflow", "keras", "numpy")


def main(measure: Callable[[bool], Report]) -> None:
    """Runs a benchmark as its module's command, then ends the process."""
    module = measure.__globals__["__spec__"].name
    name = module.rpartition(".")[2]
    title, text = title_and_text(measure.__globals__["__doc__"])
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=title)
    add_flags(parser)
    flags = parser.parse_args()
    start = time.perf_counter()
    report = measure(flags.quick)
    result = {
        "name": name,
        "title": title,
        "text": text,
        "command": f"python -m {module}" + (" --quick" if flags.quick else ""),
        "quick": flags.quick,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "seconds": round(time.perf_counter() - start, 1),
        "machine": machine(),
        "versions": versions(),
        **report.as_json(),
    }
    flags.results.mkdir(parents=True, exist_ok=True)
    (flags.results / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    page.show(report, title)
    page.draw(report.plots, flags.results / f"{name}.png")
    # Deleting a data set waits up to a minute for its tuner, so the process ends without it.
    sys.stdout.flush()
    os._exit(0)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that all benchmarks have."""
    parser.add_argument(
        "--results",
        type=Path,
        default=RESULTS,
        help="directory for JSON and pictures [%(default)s]",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="only check that the benchmark works; the figures mean nothing",
    )


def title_and_text(docstring: str) -> tuple[str, str]:
    """Returns a docstring's first line without the command, and the rest, unwrapped."""
    first, _, rest = docstring.strip().partition("\n")
    paragraphs = [" ".join(paragraph.split()) for paragraph in rest.split("\n\n")]
    return first.partition(": python -m")[0].rstrip("."), "\n\n".join(filter(None, paragraphs))


def machine() -> dict[str, str | int | float]:
    """Returns this process's cores, and the machine's processor, memory in GiB, GPUs, system."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "cores": len(os.sched_getaffinity(0)),
        "processor": names[0] if names else platform.machine(),
        "memory": round(memory, 1),
        "gpus": _gpus(),
        "system": platform.system() + " " + platform.release().partition("-")[0],
    }


def _gpus() -> str:
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "none"
    return ", ".join(found.stdout.split("\n")[:-1])


def versions() -> dict[str, str]:
    """Returns the versions of ddl, Python and the main dependencies."""
    import ddl

    found = {"ddl": ddl.__version__, "Python": platform.python_version()}
    return found | {package: importlib.metadata.version(package) for package in _PACKAGES}
