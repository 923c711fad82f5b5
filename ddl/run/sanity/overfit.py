"""--overfit_batch: a model that can learn must be able to learn one batch by heart."""

import dataclasses
import math
from collections.abc import Mapping

from ddl.checkpoints.retention import Retention
from ddl.run.plan import RunPlan
from ddl.training.trainer import Trainer

NEAR_ZERO = 0.01
"""Share of the first loss at or below which a loss counts as near zero."""

MOST_UPDATES = 1000
"""Updates after which the mode ends, if the config's run is longer."""

_LOOK_AT = """\
Check these causes, the most frequent first:
- the curve: if the loss still falls, train longer or with a larger learning rate; if it jumps,
  lower the rate. A warm-up may cover all {steps:,} updates.
- the data: look whether the inputs belong to their labels, and are scaled.
- whatever keeps a loss from zero by design: dropout, augmentation, mixing, label smoothing, masked
  tokens, distillation. Set them to zero for this check.
- the last layer: an activation that the loss applies again, or too few outputs."""

_DIFFERS = """\
In an evaluation the loss on the same batch is {loss:.4g}. Some layers behave differently there than
in training: look at the moving statistics of BatchNormalization (momentum), and at `training` in
your own layers."""


class FirstLoss:
    """Keeps the figures of the first update. An action; see `ddl.training.actions.Action`.

    Attributes:
      figures: The figures; empty before the first update.
    """

    def __init__(self, trainer: Trainer):
        """Keeps the trainer."""
        self._trainer = trainer
        self.figures: Mapping[str, float] = {}

    def next_step(self, step: int) -> int | None:
        """Returns 1 before the first update; None after it."""
        return 1 if step < 1 else None

    def __call__(self, step: int) -> None:
        """Reads the figures at step 1; those that a log has read already are in the history."""
        if step == 1:
            logged = [row for row in self._trainer.history if row["split"] == "train"]
            self.figures = logged[-1] if logged else self._trainer.peek_metrics()


def plan_of(run_plan: RunPlan, steps_per_epoch: int) -> RunPlan:
    """Returns the plan of the mode: as the run's, but shorter, and saved at the end alone.

    Args:
      run_plan: The plan of the run.
      steps_per_epoch: Updates per epoch.
    """
    total = min(run_plan.total_steps(steps_per_epoch), MOST_UPDATES)
    return dataclasses.replace(
        run_plan,
        train_steps=total,
        train_epochs=None,
        eval_every=None,
        checkpoint_every=None,
        log_every=max(1, min(run_plan.log_every, total // 10)),
        retention=Retention(last=1),
        on_divergence="stop",
        early_stopping=None,
    )


def verdict(
    first: Mapping[str, float],
    last: Mapping[str, float],
    evaluated: Mapping[str, float],
    steps: int,
) -> str:
    """Says whether each loss fell to near zero, and what to look at if not.

    Args:
      first: Figures of the first update.
      last: Means over the last log period.
      evaluated: Figures of the last evaluation on the same batch; empty without one.
      steps: Number of updates.
    """
    losses = [name for name in first if name == "loss" or name.startswith("loss/")]
    lines, reached = [], True
    for name in losses:
        start, end = first[name], last.get(name, math.nan)
        fell = f"{name} {start:.4g} at the first update, {end:.4g} after {steps:,}"
        if not start > 0:
            lines.append(f"{fell}. A loss that is not above zero at first cannot be judged.")
            continue
        near = end <= NEAR_ZERO * start
        reached &= near
        share = f"{end / start:.2%} of the first"
        lines.append(f"{fell}: {share}, {'near' if near else 'not near'} zero.")
    if not reached:
        lines.append(
            f"The loss of one batch should fall to {NEAR_ZERO:.0%} of its first value. "
            + _LOOK_AT.format(steps=steps)
        )
    start, again = first.get("loss", math.nan), evaluated.get("loss", math.nan)
    if reached and start > 0 and again > 10 * NEAR_ZERO * start:
        lines.append(_DIFFERS.format(loss=again))
    return "One batch: " + "\n".join(lines)
