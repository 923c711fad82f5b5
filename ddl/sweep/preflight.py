"""The check of a sweep before its first run, in a process of its own, which imports TensorFlow.

  python -m ddl.sweep.preflight points.json facts.json <flags of ddl.main with the first point>

It loads the config with each point, and builds the first run without training it. The facts that
the sweep needs are written to a file.
"""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from ddl.cli.arguments import parse
from ddl.cli.commands import exiting_on_errors
from ddl.cli.flags import FLAGS, parse_gpus
from ddl.cli.loading import prepare
from ddl.output import protect_standard_streams

if TYPE_CHECKING:
    from ddl.run.plan import RunPlan


class Facts(TypedDict):
    """Facts about the first run of a sweep.

    Attributes:
      eval: Names of the metrics of an evaluation; empty without evaluations.
      train: Names of the metrics of training.
      has_callbacks: Whether callbacks may report further metrics.
      total: Steps of the run.
      eval_every: Steps between evaluations; None for one at the end only.
      log_every: Steps between logs of training.
    """

    eval: list[str]
    train: list[str]
    has_callbacks: bool
    total: int
    eval_every: int | None
    log_every: int


def facts_of(points: Sequence[Sequence[str]]) -> Facts:
    """Checks the config with each point, builds the first run, and returns its facts.

    The parsed flags are those of the first run.

    Args:
      points: For each point, its texts for --gin_param.

    Raises:
      DdlError: If a config is wrong, or the first run cannot be built.
    """
    base = (FLAGS.gin_param or [])[: -len(points[0]) or None]
    with prepare():
        from ddl import config

        for point in points:
            config.load(
                FLAGS.gin_file, [*base, *point], FLAGS.gin_search_path or (), FLAGS.gin_allow_unused
            )
    from ddl.cli.placing import build_placement

    placement = build_placement(parse_gpus(FLAGS.gpus))
    assert placement is not None  # --cluster=none starts no server
    from ddl.config.registry import user_packages
    from ddl.distribution.workers import Workers
    from ddl.run.checks.plan import check_run_plan
    from ddl.run.train import build
    from ddl.user_code import attributing_errors

    with attributing_errors(user_packages()):
        plan, trainer = build(placement, Workers(placement.strategy))
        config.check_all_used(FLAGS.gin_allow_unused)
        check_run_plan(plan, trainer)
    return {
        "eval": list(trainer.eval_metric_names) if trainer.has_eval_data else [],
        "train": list(trainer.metric_names),
        "has_callbacks": _has_callbacks(plan),
        "total": plan.total_steps(trainer.steps_per_epoch),
        "eval_every": plan.eval_every,
        "log_every": plan.log_every,
    }


def _has_callbacks(plan: "RunPlan") -> bool:
    return bool(plan.calls)


def run() -> None:
    """Runs the check; exits with 1 for an error that the user can correct."""
    protect_standard_streams("ddl sweep")
    program, points, facts, *arguments = sys.argv
    with exiting_on_errors():
        parse(FLAGS, [program, *arguments])
        found = facts_of(json.loads(Path(points).read_text(encoding="utf-8")))
        Path(facts).write_text(json.dumps(found), encoding="utf-8")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # TensorFlow's own exit takes longer, and there is nothing to save


if __name__ == "__main__":
    run()
