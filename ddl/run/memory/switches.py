"""Predictions of the memory that a replica would hold with other settings."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from ddl.distribution.traits import traits_of
from ddl.errors import ConfigError
from ddl.microbatch import FIRST_PASS
from ddl.optimizers.named import by_name
from ddl.run.memory.of_replica import Held
from ddl.step.compiled.compiler import Compiler
from ddl.step.observing import observed_by
from ddl.step.remat import Parts, Remat
from ddl.step.remat.activations import Activations
from ddl.step.sharding.checks import is_known
from ddl.step.verbs.batches import StepBatch
from ddl.tasks.parts import seed_generators_of
from ddl.tasks.task import has_step
from ddl.training.checks.model import names_that_depend_on_microbatches
from ddl.training.trainer import Trainer


class Switch(NamedTuple):
    """A setting that takes less memory.

    Attributes:
      name: The setting, as a user writes it.
      held: The bytes that a replica would hold.
      note: Its other effects; "" for nothing but rounding or time.
    """

    name: str
    held: Held
    note: str = ""


def switches(trainer: Trainer, held: Held, available: int) -> Iterator[Switch]:
    """Yields the settings that a trainer does not use yet; several together if none fits alone.

    Sizes of variables are counted. Activations with `Trainer.remat` are counted in the graph of
    another trace. Those of a smaller microbatch are taken to be in proportion to its examples, and
    those of bfloat16 to be half of float32, with a copy of the weights in bfloat16.

    Args:
      trainer: A trainer that has traced its updates.
      held: The bytes that a replica holds.
      available: The bytes that it has.
    """
    found: list[Callable[[Held], Switch | None]] = [
        lambda now: _sharded(trainer, now),
        lambda now: _in_bfloat16(now),
        _with_remat(trainer, held),
        lambda now: _accumulating(trainer, now, available),
    ]
    used: list[Switch] = []
    together, fits = held, False
    for switch in found:
        if (alone := switch(held)) is not None:
            yield alone
            fits = fits or alone.held.total <= available
        added = switch(together) if together.total > available else None
        if added is not None:
            used.append(added)
            together = added.held
    if len(used) > 1 and not fits:
        notes = dict.fromkeys(one.note for one in used if one.note)
        yield Switch(", ".join(one.name for one in used), together, ", ".join(notes))


def _sharded(trainer: Trainer, held: Held) -> Switch | None:
    replicas = trainer.strategy.num_replicas_in_sync
    known = all(map(is_known, by_name(trainer.optimizer).values()))
    if replicas == 1 or trainer.sharding is not None or not known:
        return None
    if traits_of(trainer.strategy).replicates_handles:
        return None
    own = dataclasses.replace(held, slots=-(-held.slots // replicas))
    return Switch("--shard_optimizer_state", own)


def _in_bfloat16(held: Held) -> Switch | None:
    if held.activations is None or keras.config.dtype_policy().compute_dtype != "float32":
        return None
    own = dataclasses.replace(held, activations=held.activations // 2, copies=held.weights // 2)
    return Switch("PRECISION = 'mixed_bfloat16'", own, "rounds more")


def _accumulating(trainer: Trainer, held: Held, available: int) -> Switch | None:
    """Returns the smallest number of microbatches that fits, or the largest number."""
    if held.activations is None:
        return None
    parts = trainer.strategy.num_replicas_in_sync
    sizes = [one.global_batch_size // parts for one in trainer.pipelines.values()]
    batch, now, activations = math.gcd(*sizes), trainer.accumulation_steps, held.activations
    held = dataclasses.replace(held, summed=held.summed or held.gradients)
    switch = None
    for number in range(now + 1, batch + 1):
        if batch % number == 0:
            own = dataclasses.replace(held, activations=activations * now // number)
            switch = Switch(f"ACCUMULATION_STEPS = {number}", own, _dependence(trainer))
            if own.total <= available:
                break
    return switch


def _dependence(trainer: Trainer) -> str:
    layers = names_that_depend_on_microbatches(trainer.training_layers)
    if not layers and not seed_generators_of(trainer.task):
        return ""
    what = f" ({', '.join(layers[:3])}{', …' if len(layers) > 3 else ''})" if layers else ""
    return f"changes the result{what}"


def _with_remat(trainer: Trainer, held: Held) -> Callable[[Held], Switch | None]:
    """Returns a function for the setting with which activations take the least.

    Each block is computed again alone, or as many together as the root of the number of blocks.
    """
    best: tuple[float, str] | None = None
    if held.activations and trainer.remat_parts is None and not has_step(trainer.task):
        for together in (1, None):
            counted = _counted(trainer, together)
            if counted is not None and (best is None or counted[0] < best[0]):
                best = counted
    if best is None or best[0] >= (held.activations or 0):
        return lambda now: None
    share, name = best[0] / (held.activations or 1), best[1]

    def switch(now: Held) -> Switch:
        activations = int(share * (now.activations or 0))
        return Switch(name, dataclasses.replace(now, activations=activations), "takes time")

    return switch


def _counted(trainer: Trainer, together: int | None) -> tuple[int, str] | None:
    """Returns the bytes of activations with `Trainer.remat`, and the setting's name.

    Args:
      trainer: The trainer.
      together: `Remat.together`; None for the root of the number of parts.
    """
    try:
        parts = Parts(Remat(), trainer.task, trainer.strategy)
        name = "Trainer.remat = @Remat()"
        if together is None:
            together = round(math.sqrt(len(parts.names)))
            if together < 2:
                return None
            parts = Parts(Remat(together=together), trainer.task, trainer.strategy)
            name = f"{name}, Remat.together = {together}"
        counted = _activations(trainer, parts)
    except ConfigError:  # layers that cannot be computed again, or not together
        return None
    return None if counted is None else (counted, name)


def _activations(trainer: Trainer, parts: Parts) -> int | None:
    """Returns the bytes of activations of a pass with parts computed again; traces it."""
    update = trainer._parts.update
    gradient = dataclasses.replace(
        update.gradient, remat=parts, compiler=Compiler("off", trainer.strategy, "training")
    )
    (objective,) = update.plan.losses.values()
    (pipeline,) = trainer.pipelines.values()
    state = trainer.state
    iterator = pipeline.iterator(trainer.strategy, int(state.batches))

    @tf.function(autograph=False)
    def gradients(iterator: Any) -> Any:
        batch = pipeline.next_batch(iterator, trainer.strategy, state.batches)
        given = StepBatch("", 0, batch)
        of_replicas = gradient.of_replicas(objective, update.plan.trained, given, state, FIRST_PASS)
        results = trainer.strategy.experimental_local_results
        return [results(one)[0] for one in of_replicas[0]]

    with observed_by(activations := Activations()):
        gradients.get_concrete_function(iterator)
    return activations.bytes
