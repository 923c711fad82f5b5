"""The bindings of saved configs, and those that differ between runs.

Saved configs are read as text: importing the modules that they name would run code, and a config
of an earlier version may name what is no longer there.
"""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

_BINDING = re.compile(r"([A-Za-z_][\w./]*)\s*=\s*(.*)")
_STATEMENT = re.compile(r"(import|include|from)\s+(.+)")


def bindings(text: str) -> dict[str, str]:
    """Returns the bindings of a config as texts by name, in the order of the file.

    An `import` or `include` is a binding of its own name. A later binding of a name replaces an
    earlier one, as in gin. A value of several lines is joined to one.

    Args:
      text: The config, as `operative_config.gin` and `config.gin` are written.
    """
    found: dict[str, str] = {}
    name = None
    for line in text.splitlines():
        bare = line.strip()
        if not bare or bare.startswith("#"):
            name = None
        elif match := _BINDING.fullmatch(line):
            name = match[1]
            found.pop(name, None)
            found[name] = match[2].removesuffix("\\").strip()
        elif match := _STATEMENT.fullmatch(line):
            name = None
            found[bare] = "yes"
        elif name is not None:
            found[name] = f"{found[name]} {bare.removesuffix(chr(92)).strip()}".strip()
    return found


class Difference(NamedTuple):
    """A binding that differs.

    Attributes:
      name: Name of the binding.
      values: Its text in each config; None where it is not bound.
    """

    name: str
    values: tuple[str | None, ...]


def differences(configs: Sequence[Mapping[str, str]]) -> list[Difference]:
    """Returns the bindings that are not the same in all configs; macros come first.

    A binding to a macro, such as `%LEARNING_RATE`, is the same in all even if the macro is not.

    Args:
      configs: The bindings of each run.
    """
    names = list(dict.fromkeys(name for config in configs for name in config))
    found = [Difference(name, tuple(config.get(name) for config in configs)) for name in names]
    differing = [each for each in found if len(set(each.values)) > 1]
    return sorted(differing, key=lambda each: not re.fullmatch(r"[A-Z][A-Z0-9_]*", each.name))


def text_of(config: Mapping[str, str], *names: str) -> str | None:
    """Returns the value of the first of some names that is bound and not None, unquoted.

    A value `%MACRO` is that of the macro.

    Args:
      config: The bindings.
      *names: Names, such as `TOTAL_STEPS`.
    """
    for name in names:
        value = config.get(name)
        for _ in range(10):  # a macro may name another one
            if value is None or not value.startswith("%"):
                break
            value = config.get(value[1:])
        if value not in (None, "None"):
            return str(value).strip("'\"")
    return None
