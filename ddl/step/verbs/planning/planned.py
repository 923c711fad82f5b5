"""The plan of a step, derived from the calls of its planning trace."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from ddl.errors import ConfigError
from ddl.optimizers.groups import Group, assign
from ddl.step.effects.written import check_step_writes, written_in
from ddl.step.objective import Objective
from ddl.step.verbs.plan import StepPlan
from ddl.step.verbs.planning.checks import check_covered, check_known
from ddl.step.verbs.work import Call
from ddl.tasks.parts import layers_of, own_variables_of
from ddl.tasks.task import Task


class Traced(NamedTuple):
    """The result of a planning trace.

    Attributes:
      calls: The calls of verbs.
      batches: Number of batches taken of each source, by its name.
      losses: The objective of each loss and function, by its name.
      sources: Name of the source of each of them, by its name.
      graph: Graph of the trace, a FuncGraph.
    """

    calls: Sequence[Call]
    batches: Mapping[str, int]
    losses: Mapping[str, Objective]
    sources: Mapping[str, str]
    graph: tf.Graph


def plan_of(
    task: Task,
    planned: Traced,
    groups: Mapping[str, Mapping[str, Group]],
    strategy: tf.distribute.Strategy,
) -> StepPlan:
    """Derives the plan from the calls of the planning trace, and checks it."""
    calls = planned.calls
    changes = [place for place, call in enumerate(calls) if call.changes]
    means = {call.name for call in calls if call.verb == "sum"}
    applies = [call for call in calls if call.verb == "apply"]
    gradients = [call for call in calls if call.verb == "gradients"]
    name = type(task).__name__
    if not applies:
        raise ConfigError(
            f"{name}.step applies no gradients, so it trains nothing. Call update.apply or "
            "update.minimize in it."
        )
    unused = [optimizer for optimizer in groups if optimizer not in {c.name for c in applies}]
    if unused:
        raise ConfigError(
            f"{name}.step never uses the optimizer {', '.join(map(repr, unused))}. Remove it from "
            "Trainer.optimizer, or name it in update.apply."
        )
    if idle := set(planned.batches) - set(planned.sources.values()):
        raise ConfigError(
            f"{name}.step never uses the source {', '.join(map(repr, sorted(idle)))}. Remove it "
            "from Trainer.train_data, or pass its batch to a method of update."
        )
    layers = layers_of(task)
    own = own_variables_of(task, layers)
    variables = [v.value for layer in layers for v in layer.variables]
    optimizers = [one.optimizer for of_name in groups.values() for one in of_name.values()]
    of_optimizers = [v.value for optimizer in optimizers for v in optimizer.variables]
    saved = [*variables, *own, *of_optimizers]
    assigned = written_in(planned.graph, saved)
    for variable in {id(v): v for v in [*own, *assigned]}.values():
        if not strategy.extended.variable_created_in_scope(variable):
            raise ConfigError(
                f"The variable {variable.name!r} of {name} was created outside the strategy's "
                "scope. Create the task under `with strategy.scope():`."
            )
    averaged = [v for call in calls if call.verb == "average" for v in call.variables]
    check_known(name, variables + own, calls)
    check_covered(name, layers, applies, averaged)
    check_step_writes(name, planned.graph, saved)
    of_layers = set(map(id, variables))
    by_hand = [v for v in assigned if id(v) in of_layers]
    after_change = any(call.checks for call in calls[changes[0] + 1 :])
    changed = {id(v.value) for call in applies for v in call.variables} | set(map(id, averaged))
    weights = [v.value for layer in layers for v in layer._trainable_variables]
    frozen = [
        v
        for v in weights
        if id(v) not in changed and strategy.extended.variable_created_in_scope(v)
    ]
    after_change |= bool({*map(id, by_hand)} - {*map(id, frozen)})
    variables_by_optimizer: dict[str, list[keras.Variable]] = {}
    numbers: dict[str, int | None] = {}
    for used, own_groups in groups.items():
        for optimizer, updated in assign(own_groups, _variables_of(applies, used)).items():
            variables_by_optimizer[optimizer] = updated
            numbers[optimizer] = _number_of(applies, used, updated)
    return StepPlan(
        task=task,
        losses={n: loss for n, loss in planned.losses.items() if n not in means},
        means={n: loss for n, loss in planned.losses.items() if n in means},
        groups=groups,
        sources=planned.sources,
        batches=planned.batches,
        variables=variables_by_optimizer,
        applies=numbers,
        calls=[call.identity for call in calls],
        changes=len(changes),
        only_moved={c.name for c in gradients} - {c.name for c in gradients if not c.moved},
        keeps_values=after_change or any(calls[place].sometimes for place in changes),
        averaged=averaged,
        own=own,
        frozen=frozen,
        assigned=assigned,
    )


def _variables_of(applies: Sequence[Call], optimizer: str) -> list[keras.Variable]:
    variables = [v for call in applies if call.name == optimizer for v in call.variables]
    return list({id(v): v for v in variables}.values())


def _number_of(
    applies: Sequence[Call], optimizer: str, variables: Sequence[keras.Variable]
) -> int | None:
    """Returns how often a step updates any of the variables; None if it depends on a tensor."""
    ids = set(map(id, variables))
    of_optimizer = [call for call in applies if call.name == optimizer]
    own = [call for call in of_optimizer if any(id(v) in ids for v in call.variables)]
    return None if any(call.sometimes for call in own) else len(own)
