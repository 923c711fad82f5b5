"""The lines of `--dry_run` about memory."""

from ddl.distribution.traits import traits_of
from ddl.distribution.workers import Workers
from ddl.run.memory.of_device import available_to_replica
from ddl.run.memory.of_replica import Held, held_by_replica
from ddl.run.memory.switches import switches
from ddl.step.remat.activations import Activations
from ddl.training.trainer import Trainer

_BEYOND = "without the data, TensorFlow, and buffers of operations and collectives"


def memory_of_replica(
    trainer: Trainer, activations: Activations, limit: int | None = None
) -> dict[str, str]:
    """Returns what a replica holds and what its device has, as texts by name.

    If it does not fit, the settings that take less memory follow. Call it on all workers.

    Args:
      trainer: A trainer that has traced its updates.
      activations: The observer of that trace.
      limit: `--memory_limit` in MiB, or None.
    """
    held = held_by_replica(trainer, activations)
    texts = _held(trainer, held, activations)
    traits = traits_of(trainer.strategy)
    if traits.asynchronous or traits.shares_variables:
        texts["memory of a replica"] = (
            f"about {_text(held.total)} with those on parameter servers or the host, {_BEYOND}"
        )
        return texts
    texts["memory of a replica"] = f"about {_text(held.total)}, {_BEYOND}"
    available = available_to_replica(trainer.strategy, limit)
    if available.bytes is None:
        texts["memory of its device"] = available.text
        return texts
    missing = held.total - available.bytes
    fits = "fits" if missing <= 0 else f"{_text(missing)} too little"
    texts["memory of its device"] = f"{_text(available.bytes)} ({available.text}): {fits}"
    if Workers(trainer.strategy).any(missing > 0):
        for switch in switches(trainer, held, available.bytes):
            total = switch.held.total
            fits = "fits" if total <= available.bytes else "does not fit"
            note = f"; {switch.note}" if switch.note else ""
            texts[f"memory with {switch.name}"] = f"about {_text(total)}, {fits}{note}"
    return texts


def _held(trainer: Trainer, held: Held, activations: Activations) -> dict[str, str]:
    rows = {
        "weights": held.weights,
        "gradients": held.gradients + held.summed,
        "optimizer": held.slots,
        "averages": held.averages,
        "kept for overflows": held.kept,
    }
    texts = {f"memory, {name}": _text(size) for name, size in rows.items() if size}
    if trainer.sharding is not None:
        replicas = trainer.strategy.num_replicas_in_sync
        if rows["optimizer"]:
            texts["memory, optimizer"] += f", a replica's share of the slots of {replicas} replicas"
    if held.summed:
        texts["memory, gradients"] += ", of the sum over microbatches and of one microbatch"
    if held.activations is not None:
        texts["memory, activations"] = _of_activations(trainer, activations)
    return texts


def _of_activations(trainer: Trainer, activations: Activations) -> str:
    text = f"{_text(activations.bytes or 0)} of a microbatch"
    if trainer.remat_parts is None:
        return f"{text}; Trainer.remat would keep fewer"
    return (
        f"{text}: {_text(activations.kept or 0)} kept, and {_text(activations.repeated)} of the "
        f"largest of {len(trainer.remat_parts.names)} parts that are computed again"
    )


def _text(size: int) -> str:
    """Returns a number of bytes as a text."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:,.3g} {unit}"
    return f"{size} bytes"
