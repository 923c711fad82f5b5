"""The replay of one update: its values, and whether the replay is that of the run."""

import dataclasses
import pickle
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from ddl.errors import ConfigError, ModelDirectoryError
from ddl.replay.devices import Placed
from ddl.replay.folder import Run
from ddl.replay.processes import Player, Process, ask
from ddl.replay.recorded import Recorded

_SOME = 6


@dataclasses.dataclass(frozen=True)
class Replayed:
    """An update that was computed again.

    Attributes:
      run: The run.
      step: Number of the update, from 1.
      began: Step of the checkpoint from which it was computed; 0: the initial weights.
      recorded: The values.
      verdict: Whether the replay repeats the run, as far as its checkpoints tell.
      notes: Further lines.
    """

    run: Run
    step: int
    began: int
    recorded: Recorded
    verdict: str
    notes: Sequence[str]


def replay(
    run: Run, step: int, placed: Placed, *, code: Path | None = None, verify: bool = False
) -> Replayed:
    """Computes an update again, in processes of their own.

    Args:
      run: The run.
      step: Number of the update, from 1.
      placed: The devices, and further flags for the run.
      code: Folder from which the user's modules are imported; None: as in this process.
      verify: Whether to train on to the run's next checkpoint, if there is none at this step, and
        compare with it.

    Raises:
      ConfigError: If the run has not made this update, or has rewound around it.
      DdlError: If the run cannot be built or restored.
    """
    run.check_step(step)
    with temporary_folder() as folder, ExitStack() as stack:
        players = []
        for name in ("exact", "detailed"):
            (own := folder / name).mkdir()
            detailed = name == "detailed"
            flags = placed.flags_in_detail if detailed else placed.flags
            process = Process(run.path, flags, own, code=code, in_detail=detailed)
            players.append(stack.enter_context(process))
        return replay_with(run, step, *players, verify=verify, notes=placed.notes)


def replay_with(
    run: Run,
    step: int,
    exact: Player,
    detailed: Player,
    *,
    verify: bool = False,
    notes: Sequence[str] = (),
) -> Replayed:
    """Computes an update again with two players, of which the second one records."""
    begun = ask(exact, "begin", step=step - 1)
    found = [*notes, *begun["notes"]]
    following = run.following(step)
    there = None
    if following is not None:
        try:
            there = ask(exact, "saved", step=following)
        except ModelDirectoryError as error:  # it is damaged
            found.append(str(error))
    if there is not None:
        check_no_rewind(run, begun["step"], begun["rewinds"], following, there["rewinds"])
    ask(exact, "train", to=step - 1)
    before = ask(exact, "save")
    detailed.send("restore", prefix=before["prefix"])
    ask(exact, "train", to=step)
    after = ask(exact, "save")
    detailed.receive()
    recorded = ask(detailed, "record", to=step)
    if differing(ask(detailed, "save")["digests"], after["digests"]):
        found.append(
            "The operations that record the values change the rounding of this update: the values "
            "are those of the run up to their last bits."
        )
    verdict = (
        "The run has no later checkpoint that can be compared with the replay."
        if following is None or there is None
        else f"The next checkpoint of the run is step {following:,}; --verify trains on to it and "
        "compares."
    )
    if there is not None and (following == step or verify):
        if following != step:
            ask(exact, "train", to=following)
            after = ask(exact, "save")
        verdict = verdict_of(run, following or step, after, there)
    return Replayed(
        run, step, begun["step"], pickle.loads(Path(recorded["file"]).read_bytes()), verdict, found
    )


def verdict_of(run: Run, step: int, state: Mapping[str, Any], saved: Mapping[str, Any]) -> str:
    """Says whether a replayed state is the run's checkpoint of a step.

    Args:
      run: The run.
      step: The step.
      state: The result of `Replayer.save`.
      saved: The result of `Replayer.saved`.
    """
    if not (others := differing(state["digests"], saved["digests"])):
        return f"The replay repeats {run.path}: it ends at the bits of its checkpoint step-{step}."
    return (
        f"THE REPLAY DOES NOT REPEAT {run.path}: its checkpoint step-{step} has other values of "
        f"{listed(others, saved['names'])}. The code, the data, the versions or the devices have "
        "changed since the run, or an operation does not repeat its bits."
    )


def check_no_rewind(run: Run, begun: int, rewinds: int, following: int | None, later: int) -> None:
    """Raises ConfigError if a run rewound between two of its states."""
    if rewinds != later:
        raise ConfigError(
            f"{run.path} diverged and rewound between step {begun:,} and its checkpoint of step "
            f"{following or 0:,}, and a replay from step {begun:,} would repeat updates that were "
            "given up. Ask for a step after that checkpoint, or for one before step "
            f"{begun + 1:,}."
        )


def differing(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """Returns the paths whose digests differ, or that only one state has."""
    return [path for path in {**one, **other} if one.get(path) != other.get(path)]


def listed(paths: Sequence[str], names: Mapping[str, str]) -> str:
    """Returns the first of some variables in words, and the number of the others."""
    some = ", ".join(names.get(path, path) for path in paths[:_SOME])
    more = f" and {len(paths) - _SOME} more" if len(paths) > _SOME else ""
    return some + more


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Yields a folder for states and recordings, which is removed afterwards."""
    # Not a TemporaryDirectory, which a fork of this process would remove at its end.
    folder = Path(tempfile.mkdtemp(prefix="ddl-replay-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
