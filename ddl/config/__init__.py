"""Configs of runs: gin files, checked before anything is built, with a check for unused bindings.

The order of use is `load` → `build_bound`/`get_macro`/`set_macro` → `build` → `check_all_used` →
`config_text`/`operative_config_text`. Every fault in a config raises a `ConfigError` with the
fault, its location and the remedy. There is one config per process, since gin has one.
"""

import pprint
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gin

from ddl.config import registry, statements, usage
from ddl.config.registry import calling, shown
from ddl.config.statements import MACRO, Binding, Import, Key, Reader, Texts, place

_given: Sequence[Binding] = ()  # all bindings in the order of the files, with full names
_bindings: dict[Key, Binding] = {}  # the effective ones
_modules: Texts = ()  # the imported ones


def load(
    files: Texts, params: Texts = (), search_path: Texts = (), allowed_unused: Texts | None = None
) -> None:
    """Reads and checks a config, and replaces the one loaded before.

    Later statements override earlier ones; params come last. The search order for files is the
    folder of an including file, the working directory, the search path, ddl's package folder and
    ddl's configs. Each file is read once.

    Args:
      files: Paths of config files.
      params: Single statements such as `NAME = value`.
      search_path: Further folders to search.
      allowed_unused: As in `check_all_used`. If given, macros that no binding refers to are errors
        already here.

    Raises:
      ConfigError: If a file or an imported module cannot be read, or a statement is invalid.
    """
    global _given, _bindings, _modules
    _given, _bindings, _modules = (), {}, ()
    gin.clear_config()
    reader = Reader(search_path)
    found = [statement for file in files for statement in reader.file(file)]
    found += [statement for param in params for statement in reader.text(param, "--gin_param")]
    given = [one for one in found if isinstance(one, Binding)]
    modules = dict.fromkeys(registry.import_module(x) for x in found if isinstance(x, Import))
    usage.check_macros(given, allowed_unused)
    registry.register(given)  # imports TensorFlow
    from ddl.config import types  # and this typeguard, for which the faults above need not wait

    statements.raise_if_any(map(registry.bind, given))
    given = [one._replace(selector=registry.full_name(one.selector)) for one in given]
    bindings = {one[:3]: one for one in given}
    statements.raise_if_any(types.misfit(one, bindings) for one in bindings.values())
    _given, _bindings, _modules = given, bindings, [*modules]


def get_macro(name: str) -> Any:
    """Returns a macro's value; None if it is not defined. It then counts as used.

    Args:
      name: The macro.

    Raises:
      ConfigError: If its value cannot be built.
    """
    return build(f"{name}/{MACRO}") if (name, MACRO, "value") in _bindings else None


def set_macro(name: str, value: Any) -> None:
    """Sets a macro at run time; both saved texts show the value.

    Args:
      name: The macro, which need not be defined in the config.
      value: A value that can be written to a config.
    """
    key = (name, MACRO, "value")
    _bindings[key] = Binding(*key, value, None)
    gin.bind_parameter(key, value)
    get_macro(name)  # marks it as used


def build(name: str, *args: Any, **kwargs: Any) -> Any:
    """Calls a registered item with the arguments bound in the config.

    Args:
      name: Name of the item, such as `RunPlan` or `train/images`.
      *args: Positional arguments; they override the config's.
      **kwargs: Keyword arguments; they override the config's.

    Returns:
      The result of the call.

    Raises:
      ConfigError: If a value is missing or rejected; the TypeError or ValueError is its cause.
    """
    return calling(lambda: gin.get_configurable(name)(*args, **kwargs), name, _bindings)


def build_bound(name: str, parameter: str, convert: Callable[[Any], Any] | None = None) -> Any:
    """Builds the value bound for one parameter once, ahead of the call that takes it.

    A later `build(name)` or `build_bound` reuses this value.

    Args:
      name: Name of the registered item, without a scope.
      parameter: The parameter of the item.
      convert: Makes of the value what the item gets, unless it is None.

    Returns:
      The value; None if nothing is bound.

    Raises:
      ConfigError: If a value is missing or rejected, as in `build`.
    """
    built = f"{name}.{parameter}"
    return calling(lambda: registry.build_bound(name, parameter, convert), built, _bindings)


def check_all_used(allowed_unused: Texts = ()) -> list[str]:
    """Checks that a call so far has used every binding and macro; see `ddl.config.usage`.

    Drops the bindings of items that a later statement replaced by another item.

    Args:
      allowed_unused: Names that may be unused, such as `Adam.beta_1` or `Adam.*`.

    Returns:
      A line about the dropped bindings, if there are any.

    Raises:
      ConfigError: Lists the unused bindings and macros.
    """
    used = registry.operative_values()
    unused = usage.unused(_bindings, used)
    found = {k: b for k, b in unused.items() if not usage.is_allowed(b, allowed_unused)}
    dropped = usage.superfluous(found, _given, _bindings)
    usage.raise_unused([b for k, b in found.items() if k not in dropped], used, _given)
    for key in dropped:
        del _bindings[key]
    names = ", ".join(map(shown, dropped))
    by = " and ".join({place(binding.location): None for binding in dropped.values()})
    return [f"{by} replaced their items, so these have no effect: {names}."] if dropped else []


def places_mentioned(message: str) -> list[str]:
    """Returns a line with the place of each binding that an error mentions by name; at most four.

    A binding to a macro is followed to the macro's own line. Defaults shipped with ddl are left
    out. A message that has a place already gets no other.

    Args:
      message: Text of an error that mentions names such as `RunPlan.train_steps` or `TRAIN_STEPS`.
    """
    bindings = {} if re.search(r"(?m)^ *\S+:\d+: ", message) else _bindings
    words = {word.rstrip(".") for word in re.findall(r"[\w.@%/]+", message)}
    hits = [statements.source(x, bindings) for k, x in bindings.items() if shown(k) in words]
    return list(dict.fromkeys(registry.line_of(x) for x in hits if not usage.is_allowed(x)))[:4]


def config_text() -> str:
    """Returns all effective bindings as config text, without overridden ones."""
    return _text({key: binding.value for key, binding in _bindings.items()})


def operative_config_text() -> str:
    """Returns all values used so far, including defaults; loading the text repeats the run.

    Call it after everything is built: it covers only items that were called.
    """
    return _text(registry.operative_values())


def _text(values: Mapping[Key, Any]) -> str:
    """Returns the text that imports the modules and binds values: macros first, then by item."""
    lines = [f"import {module}" for module in _modules]
    for key in sorted(values, key=lambda key: (key[1] != MACRO, registry.short_name(key[1]), key)):
        name = shown(key)
        # Dicts keep their order. A continuation line must be indented deeper than the name.
        value = pprint.pformat(values[key], width=max(97 - len(name), 40), sort_dicts=False)
        lines.append(f"{name} = " + value.replace("\n", "\n    "))
    return "\n".join(lines) + "\n"
