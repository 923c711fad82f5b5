"""The command of each benchmark: its flags, its result with machine and versions, its picture.

A benchmark is a module with a function `measure(quick)` and ends with `command.main(measure)`. The
function returns a `Report`, or yields reports that grow case by case. The command prints the report
and writes two files to the results folder: NAME.json, with the machine, the versions and the date,
and the picture NAME.png. It writes them after each case, so that a benchmark that is stopped keeps
the cases that were done. `benchmarks.page` builds the page from the results of all benchmarks.
"""

import argparse
import datetime
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import ddl
from benchmarks import page
from benchmarks.repeats import PROCESS_NUMBER, merged
from benchmarks.report import RESULTS, Report

_PACKAGES = ("tensorflow", "keras", "numpy")


def main(
    measure: Callable[..., Report | Iterable[Report]],
    *,
    processes: int = 1,
    has_cases: bool = False,
) -> None:
    """Runs a benchmark as its module's command, then ends the process.

    Args:
      measure: Measures; the argument says whether a quick run suffices.
      processes: Number of fresh processes that call `measure`. Their reports are merged.
      has_cases: Whether `measure` takes as a second argument a text that the names of the cases
        must contain. The flag --only gives it; results of a part have files of their own.
    """
    module = measure.__globals__["__spec__"].name
    title, text = title_and_text(measure.__globals__["__doc__"])
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=title)
    add_flags(parser)
    if has_cases:
        parser.add_argument("--only", default="", help="text that the names of the cases contain")
    flags = parser.parse_args()
    only = flags.only if has_cases else ""
    start = time.perf_counter()
    code = code_digest()

    def write(report: Report, is_whole: bool) -> None:
        result = {
            "name": "_".join([module.rpartition(".")[2], *re.findall(r"\w+", only)]),
            "title": f"{title}: {only}" if only else title,
            "text": text,
            "command": f"python -m {module}"
            + (" --quick" if flags.quick else "")
            + (f" --only='{only}'" if only else ""),
            "quick": flags.quick,
            "is_whole": is_whole,
            "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
            "seconds": round(time.perf_counter() - start, 1),
            "machine": machine(),
            "versions": versions(),
            "code": code if code == code_digest() else "changed while it ran",
            **report.as_json(),
        }
        _write(result, report, flags.results)

    if processes > 1 and PROCESS_NUMBER not in os.environ:
        number = 2 if flags.quick else processes
        reports: Iterable[Report] = _in_fresh_processes(module, number, flags.quick)
    else:
        measured = measure(flags.quick, only) if has_cases else measure(flags.quick)
        reports = [measured] if isinstance(measured, Report) else measured
    report = Report([])
    for report in reports:
        write(report, is_whole=False)
    write(report, is_whole=True)
    page.show(report, title)
    # Deleting a data set waits up to a minute for its tuner, so the process ends without it.
    sys.stdout.flush()
    os._exit(0)


def _write(result: dict[str, Any], report: Report, folder: Path) -> None:
    """Writes the JSON file and the picture of a benchmark."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{result['name']}.json").write_text(json.dumps(result, indent=1) + "\n")
    page.draw([*report.plots, *report.images], folder / f"{result['name']}.png")


def _in_fresh_processes(module: str, processes: int, quick: bool) -> Iterator[Report]:
    """Runs a benchmark in one process after the other; yields the merged report after each.

    Raises:
      subprocess.CalledProcessError: If one fails; what was yielded before stands.
    """
    reports = []
    for number in range(processes):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", module, f"--results={folder}"]
            command += ["--quick"] if quick else []
            environment = os.environ | {PROCESS_NUMBER: str(number)}
            subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
            (file,) = Path(folder).glob("*.json")
            reports.append(Report.from_json(json.loads(file.read_text())))
        print(f"{module}: process {number + 1} of {processes}", flush=True)
        yield merged(reports)


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


def need_gpu(name: str) -> None:
    """Ends the process, with a line and status 1, if this machine has no NVIDIA GPU."""
    if _gpus() == "none" and not Path("/dev/nvidiactl").exists():
        raise SystemExit(f"{name} needs an NVIDIA GPU, and this machine has none.")


def versions() -> dict[str, str]:
    """Returns the versions of ddl, Python and the main dependencies."""
    found = {"ddl": ddl.__version__, "Python": platform.python_version()}
    return found | {package: importlib.metadata.version(package) for package in _PACKAGES}


def code_digest() -> str:
    """Returns a digest of the code of ddl."""
    digest = hashlib.sha256()
    for file in sorted(Path(ddl.__file__).parent.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]
