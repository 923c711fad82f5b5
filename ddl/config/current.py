"""The config of this process: loading, macros, building and saved texts."""

import dataclasses
import sys
from collections.abc import Collection, Sequence
from typing import Any

import gin

from ddl.config import building, mentions, modules, registry, text, usage
from ddl.config.checks import check_macros, checked
from ddl.config.early_checks import check_values
from ddl.config.parsing import Reader
from ddl.config.replaced import Replacement, lines, replacements, superfluous
from ddl.config.values import (
    MACRO_SELECTOR,
    Binding,
    Import,
    Key,
    full_selector,
    shown,
    values_of,
    with_full_selector,
)
from ddl.errors import ConfigError, check_no_text


@dataclasses.dataclass
class _Loaded:
    """A loaded config.

    Attributes:
      bindings: The effective bindings by key.
      imports: The imported modules.
      overridden: The bindings that later ones override.
      replaced: The references of included files that including files replaced.
      withheld: Names of the macros without a value yet.
    """

    bindings: dict[Key, Binding] = dataclasses.field(default_factory=dict)
    imports: list[str] = dataclasses.field(default_factory=list)
    overridden: list[Binding] = dataclasses.field(default_factory=list)
    replaced: list[Replacement] = dataclasses.field(default_factory=list)
    withheld: set[str] = dataclasses.field(default_factory=set)


_loaded = _Loaded()


def load(
    files: Sequence[str],
    params: Sequence[str] = (),
    search_path: Sequence[str] = (),
    allowed_unused: Sequence[str] | None = None,
) -> None:
    """Reads and checks a config, and replaces the one loaded before.

    Later statements override earlier ones; params come last. The search order for files is the
    working directory, the search path, ddl's package folder and ddl's configs. An include is
    searched first in the folder of the including file.

    Args:
      files: Paths of config files.
      params: Single statements such as `NAME = value`.
      search_path: Further folders to search.
      allowed_unused: As in `check_all_used`. If given, macros that nothing can use are errors
        already here; a config that imports modules is excepted, since these may read any macro.

    Raises:
      ConfigError: If a file or an imported module cannot be read, a statement is invalid, or an
        argument is a text in place of a list.
    """
    global _loaded
    _loaded = _Loaded()
    gin.clear_config()
    imports, given = read(files, params, search_path, allowed_unused)
    registry.register_all()
    # Modules first: another file may use their items above the import.
    for statement in imports:
        modules.import_module(statement)
    bindings = checked(given, [statement.module for statement in imports])
    full = list(map(with_full_selector, given))
    replaced = list(replacements(full, bindings))
    bindings = {key: _with_float_rate(binding) for key, binding in bindings.items()}
    _loaded = _Loaded(
        bindings,
        imports=list(dict.fromkeys(statement.module for statement in imports)),
        overridden=[binding for binding in full if binding != bindings.get(binding.key)],
        replaced=replaced,
    )
    gin.parse_config(config_text())


def read(
    files: Sequence[str],
    params: Sequence[str] = (),
    search_path: Sequence[str] = (),
    allowed_unused: Sequence[str] | None = None,
) -> tuple[list[Import], list[Binding]]:
    """Reads a config and checks all that needs no item, before Keras's slow import.

    The arguments and errors are those of `load`.

    Returns:
      The imports and the bindings.
    """
    for name, given_texts in (
        ("files", files),
        ("params", params),
        ("search_path", search_path),
        ("allowed_unused", allowed_unused),
    ):
        check_no_text(f"The argument {name} of a config", given_texts)
    reader = Reader(search_path)
    statements = [statement for file in files for statement in reader.file(file)]
    statements += [statement for param in params for statement in reader.parameter(param)]
    imports = [statement for statement in statements if isinstance(statement, Import)]
    given = [statement for statement in statements if isinstance(statement, Binding)]
    if is_first := sys.modules.get("keras") is None:  # else one error reports all faults
        check_macros(given)
    if allowed_unused is not None and not imports:
        usage.raise_complaints(usage.unreferenced_macros(given, allowed_unused))
    for statement in imports:
        modules.check_exists(statement)
    if is_first:
        check_values(given, names_are_of_libraries=not imports)
    return imports, given


def _with_float_rate(binding: Binding) -> Binding:
    """Converts an integer learning rate to float, since Keras rejects integers."""
    is_rate = "LEARNING_RATE" in binding.key or binding.parameter.endswith("learning_rate")
    if is_rate and type(binding.value) is int:
        return dataclasses.replace(binding, value=float(binding.value))
    return binding


def get_macro(name: str) -> Any:
    """Returns a macro's value, or None if it is not defined. The macro then counts as used.

    Args:
      name: The macro.

    Raises:
      ConfigError: If the macro is withheld (`withhold_macro`), or its value cannot be built.
    """
    if (name, MACRO_SELECTOR, "value") not in _loaded.bindings:
        return None
    return building.call(f"{name}/{MACRO_SELECTOR}", (), {}, _loaded.bindings)


def set_macro(name: str, value: Any) -> None:
    """Sets a macro at run time; both saved texts show the value.

    Args:
      name: The macro, which need not be defined in the config.
      value: A value that can be written to a config.

    Raises:
      ValueError: If the value cannot be written to a config.
    """
    if not text.is_writable(value):
        raise ValueError(f"{name} = {value!r} cannot be written to a config and read back.")
    binding = Binding(name, MACRO_SELECTOR, "value", value)
    _loaded.bindings[binding.key] = binding
    _loaded.withheld.discard(name)
    gin.bind_parameter(binding.key, value)
    # Reading the macro marks it as used.
    get_macro(name)


class _Withheld:
    """Placeholder for an unknown value in gin's config; raises when gin copies it for a call."""

    def __init__(self, message: str):
        self._message = message

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise ConfigError(self._message)


def withhold_macro(name: str, message: str) -> None:
    """Makes reading a macro raise ConfigError until `set_macro` sets it.

    Args:
      name: The macro; ignored if the config does not define it.
      message: Message of the ConfigError.
    """
    if (name, MACRO_SELECTOR, "value") in _loaded.bindings:
        gin.bind_parameter((name, MACRO_SELECTOR, "value"), _Withheld(message))
        _loaded.withheld.add(name)


def is_withheld(name: str) -> bool:
    """Returns whether `withhold_macro` currently makes reading this macro an error."""
    return name in _loaded.withheld


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
    return building.call(name, args, kwargs, _loaded.bindings)


def build_bound(name: str, parameter: str) -> Any:
    """Builds the value bound for one parameter ahead of the call that takes it.

    A later `build(name)` reuses this value. The program can derive macros from it (`set_macro`).

    Args:
      name: Name of the registered item, without a scope.
      parameter: The parameter of the item.

    Returns:
      The value; None if nothing is bound.

    Raises:
      ConfigError: If a value is missing or rejected, as in `build`.
    """
    selector = full_selector(name)
    return building.explaining(
        lambda: registry.build_bound(selector, parameter), name, _loaded.bindings, parameter
    )


def check_all_used(allowed_unused: Sequence[str] = ()) -> list[str]:
    """Checks that a call so far has used every binding and macro; see `ddl.config.usage`.

    Drops bindings of included files that have no effect, because an including file replaced the
    reference to their item: see `ddl.config.replaced`.

    Args:
      allowed_unused: Names that may be unused, such as `Adam.beta_1` or `Adam.*`.

    Returns:
      Lines about the dropped bindings.

    Raises:
      ConfigError: Lists the unused bindings and macros; or if `allowed_unused` is a text.
    """
    check_no_text("allowed_unused", allowed_unused)
    calls = registry.calls()
    unused = usage.unused(_loaded.bindings, calls, allowed_unused)
    dropped = superfluous(unused, calls, _loaded.replaced)
    found = [key for key in unused if key not in dropped]
    usage.raise_complaints(usage.complaints(_loaded.bindings, calls, found, _loaded.overridden))
    for key in dropped:
        del _loaded.bindings[key]
    return lines(dropped)


def places_mentioned(message: str) -> list[str]:
    """Returns a line with file and line number for each binding that a message mentions.

    Args:
      message: Text of an error.
    """
    return mentions.places(message, _loaded.bindings)


def imported_modules() -> list[str]:
    """Returns the modules that the config imports."""
    return list(_loaded.imports)


def config_text() -> str:
    """Returns all effective bindings as config text, without overridden ones."""
    return text.write(_loaded.imports, values_of(_loaded.bindings.values()))


def operative_config_text() -> str:
    """Returns all values used so far, including defaults; loading the text repeats the run.

    Call it after everything is built: it covers only items that were called.
    """
    values = {
        (scope, selector, parameter): value
        for (scope, selector), taken in registry.calls().items()
        for parameter, value in taken.items()
    }
    return text.write(_loaded.imports, values)


def differences(saved_text: str, ignore: Collection[str] = ()) -> list[str]:
    """Compares the effective values of an earlier run's config with this one.

    Call it after everything is built: ddl's shipped defaults that this run does not use are
    ignored.

    Args:
      saved_text: The `config_text` of the earlier run.
      ignore: Bindings that may differ, by their shortest names, such as `RunPlan.train_steps`.

    Returns:
      Lines such as `cnn.filters: (32, 64) → (32,)`. Differences due to one macro are reported
      once, by the macro's name.

    Raises:
      ConfigError: If the saved text cannot be parsed.
    """
    statements = Reader().text(saved_text, "the saved config")
    saved = [with_full_selector(one) for one in statements if isinstance(one, Binding)]
    unused = usage.unused_defaults(_loaded.bindings, registry.calls())
    current = values_of(_loaded.bindings.values())
    return text.differences(values_of(saved), current, {*ignore, *map(shown, unused)})
