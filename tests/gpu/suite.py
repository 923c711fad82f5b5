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
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

RESULTS = Path("gpu_results")

_SECONDS = 540
"""After so many seconds no further check begins: a command has ten minutes."""


def main() -> None:
    """Runs the checks of a place, and writes what each finds."""
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
    found, wrong, begin = {}, [], time.monotonic()
    flags.results.mkdir(parents=True, exist_ok=True)
    with place.strategy() as strategy:
        for name in flags.only.split(",") if flags.only else names:
            if time.monotonic() - begin > _SECONDS:
                wrong.append(f"{name}: not run, {_SECONDS} seconds were over")
                continue
            findings = []
            try:
                findings.extend(CHECKS[name](place, strategy))
            except Exception:
                wrong.append(f"{name}: {traceback.format_exc()}")
            bad = [each for each in findings if not each.value <= each.most]  # also a NaN
            wrong += [f"{name}: {f.what}: {f.value:.3g}, at most {f.most}" for f in bad]
            found[name] = [each._asdict() for each in findings]
            text = json.dumps({"checks": found, "wrong": wrong}, indent=1, default=float)
            (flags.results / f"{place.name}.json").write_text(text + "\n")
            print(f"{place.name}, {name}: {len(findings)} figures", *wrong, sep="\n ", flush=True)
    # Deleting a data set waits up to a minute for its tuner, so the process ends without it.
    sys.stdout.flush()
    os._exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
