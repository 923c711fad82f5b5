"""The search for the first step at which two runs differ. Imports no TensorFlow."""

import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ddl.bisect.first_difference import Difference, first_difference
from ddl.errors import ConfigError
from ddl.replay.folder import Run
from ddl.replay.processes import Player, ask, ask_both
from ddl.replay.replaying import check_no_rewind, differing, listed, verdict_of

_RECORDED_STEPS = 4
"""The last steps, among which the first recorded difference decides.

It saves the last two replays, so that n steps need at most log₂ n, the recorded one included.
"""

_Report = Callable[[str], None]


class Side(NamedTuple):
    """One of two runs.

    Attributes:
      run: The run.
      exact: Replays the very updates of the run.
      detailed: Starts a player that records.
    """

    run: Run
    exact: Player
    detailed: Callable[[], Player]


class Result(NamedTuple):
    """The result of a search.

    Attributes:
      equal: The last step at which the runs were seen to be the same.
      differs: A step at which they were seen to differ; None if they are the same throughout.
      difference: The first difference; None if they are the same, or if the recorded steps are.
      replays: Number of replays of both runs, the recorded one included.
      verdicts: Whether the replays repeat the runs, as far as their checkpoints tell.
    """

    equal: int
    differs: int | None
    difference: Difference | None
    replays: int
    verdicts: Sequence[str] = ()


class _Search:
    """The search; its players are at the same step between the calls."""

    def __init__(self, a: Side, b: Side, report: _Report):
        self.sides = (a, b)
        self.runs = (a.run, b.run)
        self.report = report
        self.replays = 0
        self._prefixes: list[str] = []  # of the states at `_equal`
        self._at = -1  # the step at which both players are

    @property
    def players(self) -> list[Player]:
        return [side.exact for side in self.sides]

    def from_checkpoints(self) -> tuple[int | None, int | None]:
        """Compares the checkpoints that both runs have, in order.

        Returns:
          The step of the last one that is the same before the first that is not, and that one's;
          None if there is none.
        """
        equal = None
        for step in sorted(set(self.runs[0].checkpoints) & set(self.runs[1].checkpoints)):
            states = ask_both(self.players, "saved", step=step)
            _check_same_variables(self.runs, states)
            if others := _differing(states):
                self.report(f"checkpoint step-{step}: {_told(others, states[0])}")
                return equal, step
            self.report(f"checkpoint step-{step}: {_told([], states[0])}")
            equal = step
        return equal, None

    def begin(self, equal: int | None) -> tuple[list[str], int]:
        """Restores both runs at a step, or builds their initial weights; saves the states.

        Returns:
          The variables that differ there, and the number of rewinds of both runs so far.
        """
        begun = ask_both(self.players, "begin", step=equal or 0)
        for run, one in zip(self.runs, begun, strict=True):
            if one["step"] != (equal or 0):
                raise ConfigError(
                    f"{run.path}: the checkpoint of step {equal} cannot be read any more. Search "
                    "again, in a copy of the run."
                )
        self._at = equal or 0
        states = ask_both(self.players, "save")
        _check_same_variables(self.runs, states)
        self._prefixes = [state["prefix"] for state in states]
        return _differing(states), max(one["rewinds"] for one in begun)

    def probe(self, equal: int, step: int) -> bool:
        """Replays both runs from the last state that is the same to a step; returns if it is, too.

        A state that is the same is where the next replay begins.
        """
        self.replays += 1
        states = self.states_at(equal, step)
        others = _differing(states)
        self.report(f"replay of steps {equal + 1:,} to {step:,}: {_told(others, states[0])}")
        if not others:
            self._prefixes = [state["prefix"] for state in states]
        return not others

    def states_at(self, equal: int, step: int) -> list[dict[str, Any]]:
        """Trains both players from the last state that is the same to a step, and saves there."""
        if self._at != equal:
            for side, prefix in zip(self.sides, self._prefixes, strict=True):
                side.exact.send("restore", prefix=prefix)
            for player in self.players:
                player.receive()
        ask_both(self.players, "train", to=step)
        self._at = step
        return ask_both(self.players, "save")

    def recorded(self, step: int) -> Difference | None:
        """Records both runs from the last state that is the same to a step, and compares."""
        self.replays += 1
        players = [side.detailed() for side in self.sides]
        for player, prefix in zip(players, self._prefixes, strict=True):
            player.send("restore", prefix=prefix)
        for player in players:
            player.receive()
        files = [Path(one["file"]) for one in ask_both(players, "record", to=step)]
        return first_difference(*(pickle.loads(file.read_bytes()) for file in files))


def search(a: Side, b: Side, *, verify: bool = True, report: _Report = lambda _: None) -> Result:
    """Finds the first step at which two runs differ, and the first thing in it that does.

    Differences are taken to last: runs that are the same at a step were the same before it.

    Args:
      a: The first run.
      b: The second run.
      verify: Whether to replay the runs on to the checkpoint that differs, and to compare each
        with its own.
      report: Called with a line for each comparison.

    Raises:
      ConfigError: If the runs have other variables, or rewound in between.
      DdlError: If a run cannot be built, restored or trained.
    """
    found = _Search(a, b, report)
    equal, differs = found.from_checkpoints()
    end = min(a.run.reached, b.run.reached)
    if differs is None and equal is not None and equal >= end:
        return Result(equal, None, None, 0)
    saved = differs
    start, rewinds = found.begin(equal)
    if start:
        report(f"before the first update: {_told(start, {'names': {}})}")
        return Result(0, 0, _initial(start), 0)
    equal = equal or 0
    for side in (a, b):
        if (following := side.run.following(equal + 1)) is not None:
            later = ask(side.exact, "saved", step=following)["rewinds"]
            check_no_rewind(side.run, equal, rewinds, following, later)
    if differs is None:
        if found.probe(equal, end):
            return Result(end, None, None, found.replays)
        differs = end
    while differs - equal > _RECORDED_STEPS:
        middle = (equal + differs) // 2
        if found.probe(equal, middle):
            equal = middle
        else:
            differs = middle
    difference = found.recorded(differs)
    verdicts = []
    if verify and saved is not None:
        for side, state in zip((a, b), found.states_at(equal, saved), strict=True):
            there = ask(side.exact, "saved", step=saved)
            verdicts.append(verdict_of(side.run, saved, state, there))
    if difference is not None:
        equal, differs = difference.step - 1, difference.step
    return Result(equal, differs, difference, found.replays, verdicts)


def _initial(paths: Sequence[str]) -> Difference:
    nan = float("nan")
    return Difference(0, "initial weight", paths[0], (), (), None, nan, nan, nan, False, 0)


def _differing(states: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the variables that both states have and that differ."""
    one, other = (state["digests"] for state in states)
    common = {path: digest for path, digest in one.items() if path in other}
    found = differing(common, {path: other[path] for path in common})
    return sorted(found, key=lambda path: not path.startswith(_WEIGHTS))


def _told(paths: Sequence[str], state: Mapping[str, Any]) -> str:
    """Says how many variables differ, and names one."""
    if not paths:
        return "the same"
    number = "1 variable differs" if len(paths) == 1 else f"{len(paths)} variables differ"
    return f"{number}, such as {state['names'].get(paths[0], paths[0])}"


def _check_same_variables(runs: Sequence[Run], states: Sequence[Mapping[str, Any]]) -> None:
    """Raises ConfigError if two models or optimizers have other variables."""
    own = [
        {path for path in state["digests"] if not path.startswith(_MAY_LACK)} for state in states
    ]
    for run, here, there in zip(runs, own, reversed(own), strict=True):
        if alone := sorted(here - there):
            raise ConfigError(
                "Two runs are compared variable by variable, but only "
                f"{run.path} has {listed(alone, {})}. Compare runs of the same model and optimizer."
            )


_WEIGHTS = ("model/", "optimizer/_trainable_variables/")
"""The parts of a state of which a line names one first."""

_MAY_LACK = ("averages", "statistics_of_replicas", "callbacks", "random_generators", "state/")
"""Parts of a state that may be in one run alone, such as an average that only one keeps."""
