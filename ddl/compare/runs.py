"""The runs of two settings: found in folders, chosen by bindings, and checked."""

import dataclasses
import glob
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from ddl.config.parsing import Reader
from ddl.config.values import Binding, name_of
from ddl.errors import ConfigError, did_you_mean
from ddl.report.bindings import bindings
from ddl.report.files_of_run import sanity_mode_of
from ddl.sweep.axes import SEED
from ddl.sweep.definition import FILE, RUNS
from ddl.sweep.files import Split, progress

# The run sets these from its data and other bindings, and writes them to its config.
_LENGTHS = ("STEPS_PER_EPOCH", "TOTAL_STEPS")
_SHOWN = 5


@dataclasses.dataclass(frozen=True)
class Run:
    """A run that is compared.

    Attributes:
      path: Its directory.
      seed: Its seed.
      bindings: The bindings of its config without the seed, as texts by name.
      value: The last value of the metric; None if it reports none.
      finished: Whether the run is finished.
      names: Names of all figures of the split.
    """

    path: Path
    seed: int
    bindings: Mapping[str, str]
    value: float | None
    finished: bool
    names: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Setting:
    """One of the two settings.

    Attributes:
      name: `A` or `B`.
      runs: Its runs by seed.
    """

    name: str
    runs: Mapping[int, Run]

    @property
    def bindings(self) -> Mapping[str, str]:
        """The bindings of its runs, which differ in the seed alone."""
        return next(iter(self.runs.values())).bindings


def read_folder(text: str, metric: str, split: Split) -> list[Run]:
    """Reads all runs of a folder.

    Args:
      text: A sweep, a folder of runs, a run, or a pattern of such paths.
      metric: Name of the metric.
      split: Split of the metric.

    Raises:
      ConfigError: If there is no run, or a config cannot be read.
    """
    paths = sorted(map(Path, glob.glob(text))) if glob.has_magic(text) else [Path(text)]
    folders = [one for path in paths for one in _runs_in(path)]
    if not folders:
        raise ConfigError(
            f"{text} must be the folder of a sweep, a folder of runs or a pattern of such paths, "
            "but there is no run in it. Pass a --sweep_dir of ddl sweep, or a folder whose "
            "subfolders are each a --model_dir."
        )
    return [_read(folder, metric, split) for folder in folders]


def settings(
    folders: Sequence[Sequence[Run]], a: Sequence[str], b: Sequence[str], metric: str
) -> tuple[Setting, Setting]:
    """Returns the two settings, checked: each is one config over seeds, with finished runs.

    Args:
      folders: The runs of one folder that has both settings, or those of two.
      a: Bindings that the runs of A must have, such as `LEARNING_RATE = 0.1`.
      b: Bindings that the runs of B must have.
      metric: Name of the metric.

    Raises:
      ConfigError: If the runs do not make two settings with at least two seeds each, differ beyond
        what is compared, are not finished, or do not report the metric.
    """
    if len(folders) == 1 and not (a and b):
        sides = _only_two(folders[0])
        chosen = dict.fromkeys(name for name in _differing(side[0] for side in sides))
    else:
        picks = [_parsed(texts, flag) for texts, flag in ((a, "--a"), (b, "--b"))]
        sides = [
            _with(runs, pick, flag)
            for runs, pick, flag in zip(
                [folders[0], folders[-1]], picks, ("--a", "--b"), strict=True
            )
        ]
        chosen = dict.fromkeys(name for pick in picks for name in pick)
    made = [_setting(name, runs, metric) for name, runs in zip("AB", sides, strict=True)]
    first, second = made
    same = {run.path.resolve() for run in first.runs.values()}
    if same & {run.path.resolve() for run in second.runs.values()}:
        raise ConfigError(
            "A and B must be different runs, but they share some. Choose them by --a and --b, or "
            "pass two folders."
        )
    differing = _differing([next(iter(one.runs.values())) for one in made])
    beyond = [name for name in differing if name not in chosen and name not in _LENGTHS]
    if chosen and beyond:
        raise ConfigError(
            f"A and B must differ in {', '.join(chosen)} alone, but they differ in more:\n"
            + _listing(beyond, [one.bindings for one in made])
            + "\nName these bindings in --a and --b, too, or choose other runs."
        )
    return first, second


def differing(first: Setting, second: Setting) -> list[str]:
    """Returns the names of the bindings in which two settings differ, in the order of the config.

    Those that a run derives from its data and other bindings are left out if there are others.
    """
    found = _differing([next(iter(one.runs.values())) for one in (first, second)])
    return [name for name in found if name not in _LENGTHS] or found


def _runs_in(path: Path) -> list[Path]:
    """Returns the runs in a path, without those of sanity modes in a folder of runs."""
    try:
        if (path / FILE).is_file():
            path = path / RUNS
        if (mode := sanity_mode_of(path)) is not None:
            raise ConfigError(
                f"{path} was written by --{mode}, which is no real run. Pass the folder of a run."
            )
        if _is_run(path):
            return [path]
        if not path.is_dir():
            return []
        return sorted(one for one in path.iterdir() if _is_run(one) and not sanity_mode_of(one))
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror or error}. Change its permissions, or pass "
            "another folder."
        ) from error


def _is_run(path: Path) -> bool:
    return any((path / name).is_file() for name in ("metrics.jsonl", "config.gin"))


def _read(folder: Path, metric: str, split: Split) -> Run:
    try:
        text = (folder / "config.gin").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{folder} must have a config.gin, which says the seed and the setting of the run, but "
            f"it cannot be read: {getattr(error, 'strerror', None) or error}. Leave this run out."
        ) from error
    found, fault = bindings(text, str(folder / "config.gin"))
    if fault is not None:
        raise ConfigError(f"{fault}\nRestore the file from a backup, or leave this run out.")
    seed = found.pop(SEED, "")
    if not re.fullmatch(r"\d+", seed):
        raise ConfigError(
            f"{folder / 'config.gin'} must bind {SEED} to a whole number, got {seed or 'none'}. "
            "Leave this run out."
        )
    run = progress(folder, metric, split)
    return Run(folder, int(seed), found, run.last, run.finished, run.names)


def _parsed(texts: Sequence[str], flag: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in texts:
        for statement in Reader().parameter(text):
            if not isinstance(statement, Binding):
                raise ConfigError(f"{flag} must be a binding, such as 'X = 1', got {text!r}.")
            found[name_of(statement.key)] = repr(statement.value)
    return found


def _with(runs: Sequence[Run], pick: Mapping[str, str], flag: str) -> list[Run]:
    """Returns the runs with some bindings."""
    for name, value in pick.items():
        known = list(dict.fromkeys(one for run in runs for one in run.bindings))
        if name not in known and name != SEED:
            raise ConfigError(
                f"{flag}='{name} = {value}': no run binds {name}.{did_you_mean(name, known)} Write "
                "the name as in config.gin of a run."
            )
        if name == SEED:
            raise ConfigError(f"{flag} must not choose by {SEED}: all seeds are compared.")
        values = list(dict.fromkeys(run.bindings[name] for run in runs if name in run.bindings))
        runs = [run for run in runs if _same(run.bindings.get(name), value)]
        if not runs:
            raise ConfigError(
                f"{flag}='{name} = {value}': no run has this value. The runs have "
                f"{', '.join(values[:_SHOWN])}{', …' if len(values) > _SHOWN else ''}."
            )
    return list(runs)


def _same(one: str | None, other: str) -> bool:
    try:
        return one == other or (one is not None and float(one) == float(other))
    except ValueError:
        return False


def _only_two(runs: Sequence[Run]) -> list[list[Run]]:
    """Returns the runs of the only two settings of a folder."""
    groups: dict[tuple[tuple[str, str], ...], list[Run]] = {}
    for run in runs:
        groups.setdefault(tuple(sorted(run.bindings.items())), []).append(run)
    if len(groups) == 2:
        return list(groups.values())
    if len(groups) == 1:
        raise ConfigError(
            f"All {len(runs)} runs have the same setting, and two are needed. Pass a second folder."
        )
    first = [group[0] for group in groups.values()]
    names = ", ".join(name for name in _differing(first) if name not in _LENGTHS)
    raise ConfigError(
        f"The folder has {len(groups)} settings, which differ in {names}. Choose two by --a and "
        "--b, such as --a='LEARNING_RATE = 0.1' --b='LEARNING_RATE = 0.2'."
    )


def _setting(name: str, runs: Sequence[Run], metric: str) -> Setting:
    """Checks the runs of one setting."""
    if other := _differing(runs):
        raise ConfigError(
            f"The runs of {name} must differ in {SEED} alone, but they differ in more:\n"
            + _listing(other, [run.bindings for run in runs])
            + f"\nChoose the runs of one setting by --{name.lower()}."
        )
    by_seed: dict[int, Run] = {}
    for run in runs:
        if run.seed in by_seed:
            raise ConfigError(
                f"{name} must have one run of each seed, but {by_seed[run.seed].path} and "
                f"{run.path} both have {SEED} = {run.seed}. Leave one of them out."
            )
        by_seed[run.seed] = run
    if len(by_seed) < 2:
        raise ConfigError(
            f"{name} must have runs of at least two seeds, got {len(by_seed)}: a single run does "
            f"not show how much runs vary. Train it with further values of {SEED}."
        )
    if open_ := [str(run.path) for run in runs if not run.finished]:
        raise ConfigError(
            f"All runs must be finished, but {len(open_)} of {name} are not: "
            f"{_some(open_)}. Resume them first, or leave them out."
        )
    names = list(dict.fromkeys(one for run in runs for one in run.names))
    for run in runs:
        if run.value is None:
            raise ConfigError(
                f"--metric must be a figure that the runs report ({', '.join(names) or 'none'}), "
                f"got {metric!r}, which {run.path} lacks.{did_you_mean(metric, names)}"
            )
        if not math.isfinite(run.value):
            raise ConfigError(
                f"{metric} must be finite at the end of each run, but in {run.path} it is not. "
                "Compare another metric."
            )
    return Setting(name, dict(sorted(by_seed.items())))


def _differing(runs: Iterable[Run]) -> list[str]:
    """Returns the names of the bindings that are not the same in all runs."""
    configs = [run.bindings for run in runs]
    names = dict.fromkeys(name for config in configs for name in config)
    return [name for name in names if len({config.get(name) for config in configs}) > 1]


def _listing(names: Sequence[str], configs: Sequence[Mapping[str, str]]) -> str:
    lines = []
    for name in names[:_SHOWN]:
        values = dict.fromkeys(config.get(name, "not bound") for config in configs)
        lines.append(f"  {name}: {_some(list(values))}")
    return "\n".join([*lines, "  …"][: len(lines) + (len(names) > _SHOWN)])


def _some(texts: Collection[str]) -> str:
    return ", ".join(list(texts)[:_SHOWN]) + (", …" if len(texts) > _SHOWN else "")
