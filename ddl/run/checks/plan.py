"""Checks of a run plan against its Trainer, before training."""

from ddl.callbacks import AfterEvaluation, Every
from ddl.errors import ConfigError
from ddl.optimizers.plateau import plateaus_of
from ddl.run.plan import RunPlan
from ddl.training.trainer import Trainer


def check_best_metric(
    metric: str | None, trainer: Trainer, parameter: str = "Retention.best_metric"
) -> None:
    """Raises ConfigError if evaluations do not report `metric`; None passes.

    Args:
      metric: Name of the metric.
      trainer: The trainer.
      parameter: The parameter that names it.
    """
    if metric is not None and not trainer.has_eval_data:
        raise ConfigError(
            f"{parameter} is {metric!r}, but there is no data to evaluate on. Bind "
            f"Trainer.eval_data, or leave {parameter} out."
        )
    if metric is not None and metric not in trainer.eval_metric_names:
        raise ConfigError(
            f"{parameter} must be a metric of the evaluation "
            f"({', '.join(trainer.eval_metric_names)}), got {metric!r}."
        )


def check_run_plan(run_plan: RunPlan, trainer: Trainer) -> None:
    """Checks that the run plan is possible with the trainer.

    Raises:
      ConfigError: If the plan evaluates and there is no evaluation data, these lack the metric of
        `early_stopping`, or a callback cannot run.
    """
    for callback in run_plan.calls:
        callback.check(trainer)
    if run_plan.early_stopping is not None:
        check_best_metric(run_plan.early_stopping.metric, trainer, "EarlyStopping.metric")
    if run_plan.eval_every is not None and not trainer.has_eval_data:
        raise ConfigError(
            f"EVAL_EVERY is {run_plan.eval_every:,}, but there is no data to evaluate on. Bind "
            "Trainer.eval_data, or set EVAL_EVERY = None."
        )


def without_effect(run_plan: RunPlan, trainer: Trainer, evaluates: bool) -> list[str]:
    """Lists the settings that have no effect in a run of this length.

    They are not errors, so that a config works unchanged for a short trial run.

    Args:
      run_plan: The plan of the run.
      trainer: The trainer of the run.
      evaluates: Whether the run evaluates.

    Returns:
      One sentence for each setting.
    """
    total = run_plan.total_steps(trainer.steps_per_epoch)
    retention, eval_every = run_plan.retention, run_plan.eval_every
    found = []
    if retention.every is not None and retention.every > total:
        found.append(
            f"Retention.every is {retention.every:,}, but the run ends at step {total:,}, so it "
            "has no effect."
        )
    if retention.best_metric is not None and not evaluates:
        found.append("--mode=train does not evaluate, so Retention.best_metric has no effect.")
    elif retention.best_metric is not None and (eval_every is None or eval_every >= total):
        found.append(
            "The run evaluates only at its end, so the last checkpoint is the best by "
            "Retention.best_metric."
        )
    if run_plan.early_stopping is not None and (not evaluates or eval_every is None):
        found.append(
            "RunPlan.early_stopping has no effect, since the run evaluates only at its end, if at "
            "all."
        )
    elif run_plan.early_stopping is not None and eval_every is not None:
        # The first number sets the best; after the last step there is nothing to leave out.
        rule, in_time = run_plan.early_stopping, (total - 1) // eval_every
        if in_time <= rule.patience:
            effect = "never ends early"
            if in_time == rule.patience:
                effect = f"ends early only if {rule.metric} is NaN in all of them"
            found.append(
                f"EarlyStopping.patience is {rule.patience}, but the run has only {in_time} "
                f"evaluations before its end, so it {effect}."
            )
    found += [
        f"{type(one).__name__} ({one.name}) has steps = {one.steps:,}, but the run ends at step "
        f"{total:,}, so it is never called."
        for one in run_plan.calls
        if isinstance(one, Every) and one.steps > total
    ]
    found += [
        f"--mode=train does not evaluate, so {type(one).__name__} ({one.name}) is never called."
        for one in run_plan.calls
        if isinstance(one, AfterEvaluation) and not evaluates
    ]
    for plateau in plateaus_of(trainer.optimizer).values():
        if eval_every is None:
            break
        # The first evaluation sets the best; after the last step there is nothing to reduce.
        in_time = (total - 1) // eval_every
        if in_time <= plateau.patience:
            found.append(
                f"ReduceOnPlateau.patience is {plateau.patience}, but the run has only {in_time} "
                "evaluations before its end, so the learning rate is never reduced."
            )
    return found
