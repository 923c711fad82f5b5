"""Runs of `ddl.main` in separate processes, and the comparison of their results."""

import json
from pathlib import Path

from ddl.figures import is_measured

ROOT = Path(__file__).parents[2]


def lines(model_dir):
    found = [json.loads(line) for line in (model_dir / "metrics.jsonl").read_text().splitlines()]
    return [
        {
            name: value
            for name, value in line.items()
            if name != "examples_per_second" and not is_measured(name)
        }
        for line in found
    ]
