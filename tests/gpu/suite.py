"""The GPU suite of one place: python -m tests.gpu.suite PLACE.

Writes RESULTS/PLACE.json after each check, and ends with status 1 if a figure exceeds its limit or
a check fails. `--on_cpu` takes the GPU's path on virtual CPU devices, to try the suite's own code.
"""

import argparse
import dataclasses
import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

RESULTS = Path("gpu_results")

_SECONDS = 540
"""After so many seconds no further check begins: a command has ten minutes."""


def run(place: Any, names: Sequence[str], file: Path) -> list[str]:
    """Runs checks at a place, and writes what each finds; returns what is wrong."""
    from tests.gpu.checks import CHECKS

    found: dict[str, Any] = {}
    wrong: list[str] = []
    file.parent.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    with place.strategy() as strategy:
        for name in names:
            if time.monotonic() - begin > _SECONDS:
                wrong.append(f"{name}: not run, {_SECONDS} seconds were over")
                continue
            findings = []
            try:
                findings.extend(CHECKS[name](place, strategy))
            except Exception:
                wrong.append(f"{name}: {traceback.format_exc()}")
            bad = [each for each in findings if not each.is_good]
            wrong += [f"{name}: {f.what}: {f.value:.3g}, at most {f.most}" for f in bad]
            found[name] = [dataclasses.asdict(each) for each in findings]
            text = json.dumps({"checks": found, "wrong": wrong}, indent=1, default=float)
            file.write_text(text + "\n")
            print(f"{place.name}, {name}: {len(findings)} figures", *wrong, sep="\n ", flush=True)
    return wrong


def main() -> None:
    """Runs the checks of a place."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.suite")
    parser.add_argument("place")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder [%(default)s]")
    parser.add_argument("--only", help="names of checks, separated by commas; all if left out")
    parser.add_argument("--on_cpu", action="store_true", help="try the code on CPU devices")
    flags = parser.parse_args()

    from tests.gpu.checks import CHECKS, OF_DETERMINISM
    from tests.gpu.places import PLACES

    place = dataclasses.replace(PLACES[flags.place], on_cpu=flags.on_cpu)
    names = OF_DETERMINISM if place.deterministic else tuple(CHECKS)
    names = tuple(flags.only.split(",")) if flags.only else names
    wrong = run(place, names, flags.results / f"{place.name}.json")
    # Deleting a data set waits up to a minute for its tuner, so the process ends without it.
    sys.stdout.flush()
    os._exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
