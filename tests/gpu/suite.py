"""The GPU suite of one place: python -m tests.gpu.suite PLACE.

Writes RESULTS/PLACE.json after each check, and ends with status 1 if a figure exceeds its limit or
a check fails. `--on_cpu` takes the GPU's path on virtual CPU devices, and `--small` computes
little: both try the suite's own code.
"""

import argparse
import dataclasses
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

Check = Callable[..., Iterator[Any]]

RESULTS = Path("gpu_results")

_SECONDS = 540
"""After so many seconds no further check begins: a command has ten minutes."""


def run(place: Any, checks: Mapping[str, Check], amount: Any, file: Path) -> bool:
    """Runs checks at a place, and writes what each finds.

    Returns:
      Whether all figures are within their limits, and no check failed or was left out.
    """
    import tensorflow as tf

    from benchmarks import command

    result: dict[str, Any] = {"place": place.name, "on_cpu": place.on_cpu, "checks": {}}
    result |= {"machine": command.machine(), "versions": command.versions()}
    file.parent.mkdir(parents=True, exist_ok=True)
    begin, all_good = time.monotonic(), True
    with place.strategy() as strategy:
        result["devices"] = list(strategy.extended.worker_devices)
        result["gpus"] = [
            tf.config.experimental.get_device_details(gpu).get("device_name", "")
            for gpu in tf.config.list_physical_devices("GPU")
        ]
        for name, check in checks.items():
            start, findings, error = time.monotonic(), [], ""
            if start - begin > _SECONDS:
                error = f"not run: {_SECONDS} seconds were over"
            else:
                try:
                    findings.extend(check(place, strategy, amount))
                except Exception:
                    error = traceback.format_exc()
            good = not error and all(finding.is_good for finding in findings)
            all_good = all_good and good
            result["checks"][name] = {
                "good": good,
                "seconds": round(time.monotonic() - start, 1),
                "findings": [
                    dataclasses.asdict(each) | {"good": each.is_good} for each in findings
                ],
                "error": error,
            }
            file.write_text(json.dumps(result, indent=1, default=_plain) + "\n")
            print(f"{place.name}, {name}: {summary(result['checks'][name])}", flush=True)
    return all_good


def _plain(value: Any) -> Any:
    """Returns a NumPy number as Python's."""
    return value.item()


def summary(found: dict[str, Any]) -> str:
    """Returns a check's result in one line, or a line for each figure beyond its limit."""
    if found["error"]:
        return "failed\n" + found["error"]
    bad = [each for each in found["findings"] if not each["good"]]
    lines = [f"{each['what']}: {each['value']:.3g}, at most {each['most']:.3g}" for each in bad]
    number = len(found["findings"])
    return "\n  ".join(["missed", *lines]) if bad else f"{number} figures in {found['seconds']} s"


def main() -> None:
    """Runs the checks of a place."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.suite")
    parser.add_argument("place")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder [%(default)s]")
    parser.add_argument("--only", help="names of checks, separated by commas; all if left out")
    parser.add_argument("--on_cpu", action="store_true", help="try the code on CPU devices")
    parser.add_argument("--small", action="store_true", help="try the code with little work")
    flags = parser.parse_args()

    from tests.gpu.checks import CHECKS, OF_DETERMINISM, SMALL, WHOLE
    from tests.gpu.places import PLACES

    place = PLACES.get(flags.place)
    chosen = flags.only.split(",") if flags.only else [*CHECKS]
    if place is None or not {*chosen} <= {*CHECKS}:
        parser.error(f"Places: {', '.join(PLACES)}. Checks: {', '.join(CHECKS)}.")
    if place.deterministic and not flags.only:
        chosen = list(OF_DETERMINISM)
    place = dataclasses.replace(place, on_cpu=flags.on_cpu)
    checks = {name: CHECKS[name] for name in chosen}
    file = flags.results / f"{place.name}.json"
    good = run(place, checks, SMALL if flags.small else WHOLE, file)
    print(f"Wrote {file}.", flush=True)
    # Deleting a data set waits up to a minute for its tuner, so the process ends without it.
    sys.stdout.flush()
    os._exit(0 if good else 1)


if __name__ == "__main__":
    main()
