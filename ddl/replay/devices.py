"""The flags with which a replay takes the devices that the run had. Imports no TensorFlow."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ddl.choices import JIT_COMPILE
from ddl.distribution.traits import TRAITS
from ddl.errors import ConfigError
from ddl.replay.folder import Run

_CHOOSE = ("strategy", "num_virtual_devices", "gpus")


class Placed(NamedTuple):
    """The devices of a replay.

    Attributes:
      flags: Arguments of the command line.
      text: The devices in words.
      notes: Reasons why the replay may differ from the run in its last bits.
    """

    flags: tuple[str, ...]
    text: str
    notes: tuple[str, ...] = ()

    @property
    def flags_in_detail(self) -> tuple[str, ...]:
        """The flags for a process that records values, which XLA cannot compile."""
        others = (flag for flag in self.flags if not flag.startswith("--jit_compile="))
        return (*others, "--jit_compile=off")


def placed(run: Run, step: int, given: Sequence[str], chosen: Mapping[str, Any]) -> Placed:
    """Returns the flags for the devices on which a run computed a step.

    Args:
      run: The run.
      step: The step.
      given: The flags of the command line, which are passed on.
      chosen: Their values by name; any of --strategy, --num_virtual_devices and --gpus replaces all
        that is known of the run's devices. Shares of slots, XLA and TF32 are those of the run
        unless they are named.

    Raises:
      ConfigError: If the run used parameter servers, whose updates do not repeat.
    """
    known = run.metadata_at(step)
    strategy: Any = known.get("strategy")
    replicas, kind = known.get("replicas"), known.get("device")
    traits = TRAITS.get(strategy)  # None if the strategy is not known
    if traits is not None and traits.asynchronous:
        raise ConfigError(
            f"{run.path} trained with parameter servers: its updates are asynchronous, so that no "
            "replay repeats them. Replay a run of another strategy."
        )
    given = [*given, *_of_computation(known, chosen)]
    if any(name in chosen for name in _CHOOSE):
        return Placed(tuple(given), "the devices of the flags")
    replicas = replicas if isinstance(replicas, int) else 1
    notes = []
    if strategy is None:
        strategy = "one_device" if replicas == 1 else "mirrored"
        notes.append(
            f"{run.path} does not say on which devices it ran, as before this version of ddl; the "
            f"replay takes {strategy} on the CPU. Pass --strategy and --gpus for others."
        )
    elif traits is not None and traits.several_processes:
        strategy = "one_device" if replicas == 1 else "mirrored"
        notes.append(
            f"{run.path} ran in several processes, whose sums the replay adds in one process: the "
            "last bits may differ."
        )
    flags = [f"--strategy={strategy}"]
    if kind == "GPU":
        flags.append("--gpus=" + ",".join(map(str, range(replicas))))
    elif kind != "TPU" and replicas > 1:
        flags.append(f"--num_virtual_devices={replicas}")
    elif kind != "TPU":
        flags.append("--gpus=none")
    where = f"{replicas} {kind or 'CPU'} device{'' if replicas == 1 else 's'}"
    return Placed((*given, *flags), f"{strategy}, {where}", tuple(notes))


def _of_computation(known: Mapping[str, Any], chosen: Mapping[str, Any]) -> Iterator[str]:
    """Yields the flags of a run that change its rounding, as far as they are known."""
    shares = known.get("shard_optimizer_state") is True and "shard_optimizer_state" not in chosen
    traits = TRAITS.get(chosen.get("strategy"))  # type: ignore[arg-type]  # None if it is not given
    if shares and (traits is None or traits.can_share_slots):
        yield "--shard_optimizer_state"
        if known.get("shard_gradients") is True and "shard_gradients" not in chosen:
            yield "--shard_gradients"
    if "jit_compile" not in chosen and known.get("jit_compile") in JIT_COMPILE:
        yield f"--jit_compile={known['jit_compile']}"
    if "tf32" not in chosen and known.get("device") == "GPU" and known.get("tf32") is not None:
        yield f"--tf32={'on' if known['tf32'] else 'off'}"


def moves(run: Run, chosen: Mapping[str, Any]) -> Iterator[str]:
    """Yields a note if a run moved to other devices, but is replayed whole on those of its end."""
    known = {
        (
            *(each.get("strategy"), each.get("replicas"), each.get("device")),
            *(bool(each.get("shard_optimizer_state")), bool(each.get("shard_gradients"))),
            each.get("jit_compile") or "auto",
        )
        for each in run.checkpoints.values()
        if each
    }
    if len(known) > 1 and not any(name in chosen for name in _CHOOSE):
        yield (
            f"{run.path} moved between devices, or changed --shard_optimizer_state, "
            "--shard_gradients or --jit_compile. All of its steps are replayed as its last one was "
            "computed: the last bits may differ from the run's."
        )
