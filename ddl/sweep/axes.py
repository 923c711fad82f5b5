"""The points of a sweep: values of bindings and macros, from grids, lists and random draws.

A point is a dict from the name of each binding to its value, both as text in gin's syntax.
"""

import hashlib
import itertools
import math
import random
import re
import tokenize
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from ddl.config.parsing import Reader, parse_value
from ddl.config.values import Binding, name_of
from ddl.errors import ConfigError, either

Point: TypeAlias = dict[str, str]
"""The swept bindings of a run: name → value, both in gin's syntax."""

SEED = "SEED"
_DRAW = re.compile(
    r"\s*(?P<name>[\w./]+)\s*=\s*(?P<kind>\w+)\s*\((?P<arguments>.*)\)\s*", re.DOTALL
)
_DIGITS = 6
_LONGEST_NAME = 100


def points(
    grid: Sequence[str], lists: Sequence[str], draw: Sequence[str], draws: int | None, seed: int
) -> list[Point]:
    """Returns the points of a sweep: grid × positions of the lists × draws.

    Args:
      grid: Bindings to lists, such as `LEARNING_RATE = [0.1, 0.2]`; every combination is a point.
      lists: Bindings to lists of the same length; their values at the same position go together.
      draw: Bindings to distributions, such as `LEARNING_RATE = log_uniform(1e-4, 1e-1)`.
      draws: Number of draws; None if `draw` is empty.
      seed: Seed of the draws. A draw is a function of seed, number and name: more draws keep the
        first ones.

    Raises:
      ConfigError: If there is nothing to sweep, or a text is wrong.
    """
    in_grid = [_values(text, "--grid") for text in grid]
    in_lists = [_values(text, "--list") for text in lists]
    drawn = [_distribution(text) for text in draw]
    names = [name for name, _ in [*in_grid, *in_lists, *drawn]]
    if not names:
        raise ConfigError(
            "A sweep needs at least one binding to vary, got none. Pass --grid, --list or --draw, "
            "such as --grid='LEARNING_RATE = [0.05, 0.1]'."
        )
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{name} must be swept once, got it twice. Remove one of the two.")
    lengths = {name: len(values) for name, values in in_lists}
    if len(set(lengths.values())) > 1:
        listing = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise ConfigError(
            f"All --list must have the same number of values, since those at the same position "
            f"are used together, got: {listing}. Add or remove values, or use --grid for all "
            "combinations."
        )
    if bool(drawn) != (draws is not None):
        given = "--draws" if drawn else "--draw"
        raise ConfigError(
            f"--draw and --draws go together, and {given} is missing. Pass both, such as "
            "--draw='LEARNING_RATE = log_uniform(1e-4, 1e-1)' --draws=20."
        )
    columns = [values for _, values in in_lists]
    rows = [dict(zip(lengths, row, strict=True)) for row in zip(*columns, strict=True)]
    tries = [
        {name: repr(make(_generator(seed, name, number))) for name, make in drawn}
        for number in range(draws or 0)
    ]
    combinations = [
        dict(zip((name for name, _ in in_grid), row, strict=True))
        for row in itertools.product(*(values for _, values in in_grid))
    ]
    found = [
        {**row, **drawing, **combination}
        for row in rows or [{}]
        for drawing in tries or [{}]
        for combination in combinations
    ]
    # Few choices may be drawn twice: the same point is one run.
    return list({run_name(point): point for point in found}.values())


def run_name(point: Point) -> str:
    """Returns the name of the run of a point, which names its folder.

    The same point has the same name in any sweep. The seed comes last. A value that a folder's name
    cannot hold is shortened, and a hash follows.
    """
    names = sorted(point, key=lambda name: (name == SEED, name))
    text = ",".join(f"{name}={point[name]}" for name in names)
    bare = re.sub(r"[\s'\"()\[\]@]+", "", text)
    plain = re.sub(r"[^\w.=,+-]+", "_", bare, flags=re.ASCII)
    if plain == text and len(plain) <= _LONGEST_NAME:
        return plain
    return f"{plain[:_LONGEST_NAME]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def params(point: Point) -> list[str]:
    """Returns the point as texts for --gin_param."""
    return [f"{name} = {value}" for name, value in point.items()]


def _values(text: str, flag: str) -> tuple[str, list[str]]:
    """Returns the name and the values of a binding to a list."""
    try:
        statements = list(Reader().parameter(text))
    except ConfigError as error:
        raise ConfigError(str(error).replace("--gin_param", flag)) from None
    if len(statements) != 1 or not isinstance(statements[0], Binding):
        raise ConfigError(
            f"{flag} must be one binding to a list of values, such as 'SEED = [0, 1, 2]', got "
            f"{text!r}."
        )
    name, values = name_of(statements[0].key), statements[0].value
    if not isinstance(values, list | tuple):
        raise ConfigError(
            f"{flag} must bind a list of values, such as '{name} = [{values!r}]', got {text!r}."
        )
    if not values:
        raise ConfigError(
            f"{flag} must have at least one value, got {text!r}. Add values, or leave it out."
        )
    texts = list(map(repr, values))
    for value in texts:
        if texts.count(value) > 1 and flag == "--grid":
            raise ConfigError(
                f"{flag} must have each value once, got {value} twice in {text!r}. Remove one."
            )
    return name, texts


def _distribution(text: str) -> tuple[str, Callable[[random.Random], Any]]:
    """Returns the name of a binding and the function that draws its value."""
    found = _DRAW.fullmatch(text)
    if found is None or found["kind"] not in _KINDS:
        raise ConfigError(
            f"--draw must be NAME = {either(f'{kind}(…)' for kind in _KINDS)}, such as "
            f"'LEARNING_RATE = log_uniform(1e-4, 1e-1)', got {text!r}."
        )
    try:
        arguments = parse_value(f"[{found['arguments']}]")
    except (SyntaxError, tokenize.TokenError):
        arguments = None
    make = None if arguments is None else _KINDS[found["kind"]](arguments)
    if make is None:
        raise ConfigError(f"--draw={text!r}: {_NEEDED[found['kind']]}")
    return found["name"], make


def _uniform(arguments: list[Any]) -> Callable[[random.Random], Any] | None:
    if not _is_range(arguments):
        return None
    low, high = arguments
    return lambda generator: _rounded(generator.uniform(low, high))


def _log_uniform(arguments: list[Any]) -> Callable[[random.Random], Any] | None:
    if not _is_range(arguments) or arguments[0] <= 0:
        return None
    low, high = map(math.log, arguments)
    return lambda generator: _rounded(math.exp(generator.uniform(low, high)))


def _choice(arguments: list[Any]) -> Callable[[random.Random], Any] | None:
    if len(arguments) != 1 or not isinstance(arguments[0], list | tuple) or not arguments[0]:
        return None
    return lambda generator: generator.choice(arguments[0])


def _is_range(arguments: list[Any]) -> bool:
    numbers = [one for one in arguments if isinstance(one, int | float) and math.isfinite(one)]
    return len(arguments) == len(numbers) == 2 and numbers[0] < numbers[1]


def _rounded(value: float) -> float:
    """Returns a value with few digits, so that names of runs stay readable."""
    return float(f"{value:.{_DIGITS}g}")


_KINDS = {"uniform": _uniform, "log_uniform": _log_uniform, "choice": _choice}
_NEEDED = {
    "uniform": "uniform takes two numbers, the smaller one first, such as uniform(0.0, 0.5).",
    "log_uniform": "log_uniform takes two positive numbers, the smaller one first, such as "
    "log_uniform(1e-4, 1e-1).",
    "choice": "choice takes one list of values, such as choice([32, 64, 128]).",
}


def _generator(seed: int, name: str, number: int) -> random.Random:
    # A text as seed gives the same numbers on every machine and in every version of Python.
    return random.Random(f"{seed}/{name}/{number}")
