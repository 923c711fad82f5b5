"""The computation of a trainer: the plan of its step, and the objective of its evaluation."""

from collections.abc import Callable, Mapping

import tensorflow as tf

from ddl.data.pipeline import BatchPipeline
from ddl.distribution.traits import traits_of
from ddl.errors import ConfigError
from ddl.optimizers.groups import Group, assign
from ddl.step.objective import Objective
from ddl.step.verbs.gradients import trainable_variables
from ddl.step.verbs.plan import BUILT_IN, StepPlan
from ddl.step.verbs.planning import plan_step
from ddl.tasks.task import LossFunction, Task, evaluation_loss, has_step


def step_plan(
    task: Task,
    groups: Mapping[str, Mapping[str, Group]],
    objective: Callable[[LossFunction | None, str], Objective],
    strategy: tf.distribute.Strategy,
    data: Mapping[str, BatchPipeline],
) -> StepPlan:
    """Returns the plan of the task's own step, or of the built-in one; builds the models.

    Raises:
      ConfigError: If the strategy cannot run a step of one's own, the step is misused, or there are
        several optimizers without a step.
    """
    name = type(task).__name__
    if has_step(task):
        if traits_of(strategy).asynchronous:
            raise ConfigError(
                f"{name} has a step of its own, which --strategy=parameter_server cannot run: its "
                "workers update independently, without a global batch. Use another strategy."
            )
        return plan_step(task, groups, objective, strategy, data)
    if list(data) != [""]:
        raise ConfigError(
            f"{name} has no `step`, which several sources in Trainer.train_data need, got "
            f"{', '.join(data)}. Pass one source, or give the task a method step(update, batch)."
        )
    if len(groups) > 1:
        raise ConfigError(
            f"{name} has no `step`, which several optimizers need, got {', '.join(groups)}. Pass "
            "one optimizer; or pass ParameterGroups, which name the variables of each; or give the "
            "task a method step(update, batch)."
        )
    (own_groups,) = groups.values()
    grouped = any(name not in groups or one.frozen_until for name, one in own_groups.items())
    if grouped and traits_of(strategy).asynchronous:
        raise ConfigError(
            "--strategy=parameter_server cannot run ParameterGroups: its workers count the "
            "updates of one optimizer. Pass one optimizer, or use another strategy."
        )
    of_task = objective(None, "")
    variables = assign(own_groups, trainable_variables(task.model))
    return StepPlan(
        task=task,
        losses={BUILT_IN: of_task},
        groups=groups,
        variables=variables,
        applies=dict.fromkeys(variables, 1),
    )


def evaluation_objective(
    task: Task,
    plan: StepPlan,
    objective: Callable[[LossFunction | None], Objective],
    *,
    is_planned: bool,
) -> Objective | None:
    """Returns the objective whose metrics an evaluation reports; None if the task has none.

    Args:
      task: The task.
      plan: Its plan.
      objective: Builds the objective of a loss for the evaluation data.
      is_planned: Whether the evaluation data have the form of the training data.
    """
    if hasattr(task, "per_example"):
        trained = plan.losses.get(BUILT_IN)
        if trained is not None and trained.loss == task.per_example and is_planned:
            return trained
        return objective(None)
    loss = evaluation_loss(task)
    return None if loss is None else objective(loss)


def not_evaluated(task: Task) -> str:
    """Returns the error for a task that an evaluation is asked of and that has none."""
    return (
        f"{type(task).__name__} cannot be evaluated: it has neither `per_example` nor `evaluate`. "
        "Give it a method evaluate(features) that returns a ddl.PerExample, or leave out the "
        "evaluation data."
    )
