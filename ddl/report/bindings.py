"""The bindings of saved configs, and those that differ between runs.

Saved configs are read as text: importing the modules that they name would run code, and a config
of an earlier version may name what is no longer there.
"""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ddl.config.parsing import Reader
from ddl.config.values import Import, name_of
from ddl.errors import ConfigError


def bindings(text: str, name: str) -> tuple[dict[str, str], ConfigError | None]:
    """Returns the bindings of a config as texts by name, in the order of the file.

    An `import` is a binding of its own name. A later binding of a name replaces an earlier one, as
    in gin. Values have one form, however they are written: 1e-3 is 0.001.

    Args:
      text: The config, as `operative_config.gin` and `config.gin` are written.
      name: Name of its file, for errors.

    Returns:
      The bindings, and the fault that ends them; None if the whole text can be parsed.
    """
    found: dict[str, str] = {}
    try:
        for statement in Reader().text(text, name):
            if isinstance(statement, Import):
                found[f"import {statement.module}"] = "yes"
                continue
            bound = name_of(statement.key)
            found.pop(bound, None)
            found[bound] = repr(statement.value)
    except ConfigError as error:
        return found, error
    except ValueError as error:  # an integer too long to be written in decimal digits
        return found, ConfigError(f"{name}: {error}")
    return found, None


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
    Unlike `ddl.config.differences`, this fills in no defaults: those of this version of ddl may not
    be those of the runs.

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
