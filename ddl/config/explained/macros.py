"""The macros of `standard.gin` with the parameters that they set, and the configs of ddl."""

import dataclasses
import itertools
import pathlib
import re

from ddl.config.parsing import CONFIGS, STANDARD, Reader
from ddl.config.values import Binding, Macro, leaves


@dataclasses.dataclass(frozen=True)
class StandardMacro:
    """A macro that every config with `standard.gin` has.

    Attributes:
      name: Its name.
      default: Its value in `standard.gin`, as text.
      comment: The comment beside it; may be empty.
      sets: The parameters that take its value, such as `Trainer.clip_norm`.
    """

    name: str
    default: str
    comment: str
    sets: tuple[str, ...]


def standard_macros() -> list[StandardMacro]:
    """Returns the macros in the order of `standard.gin`."""
    bindings = [each for each in Reader().file(STANDARD) if isinstance(each, Binding)]
    return [
        StandardMacro(
            binding.scope,
            repr(binding.value),
            binding.location.text.partition("#")[2].strip() if binding.location else "",
            tuple(
                f"{other.selector}.{other.parameter}"
                for other in bindings
                if Macro(binding.scope) in leaves(other.value)
            ),
        )
        for binding in bindings
        if binding.is_macro
    ]


def shipped_configs() -> list[tuple[str, str]]:
    """Returns name and description of each config that comes with ddl, from its header."""
    found = []
    for folder in map(pathlib.Path, CONFIGS[:1]):
        for path in sorted(folder.rglob("*.gin")):
            lines = itertools.takewhile(lambda line: line[:1] == "#", path.read_text().splitlines())
            # The command stands first, and a line without text ends it.
            _, _, description = "\n".join(line[1:].strip() for line in lines).partition("\n\n")
            sentence = re.split(r"(?<=\.) (?=[A-Z])", " ".join(description.split()))[0]
            found.append((str(path.relative_to(folder)), sentence))
    return found
