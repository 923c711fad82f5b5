"""The config of this process, and what can be asked of it."""

import dataclasses
import importlib
from collections.abc import Collection, Sequence
from typing import Any

import gin

from ddl import registry
from ddl.config import building, text, usage
from ddl.config.checks import checked
from ddl.config.parsing import Reader
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
from ddl.errors import ConfigError


@dataclasses.dataclass
class _Loaded:
    """The bindings that count, by key, and the modules imported."""

    bindings: dict[Key, Binding] = dataclasses.field(default_factory=dict)
    imports: list[str] = dataclasses.field(default_factory=list)


_loaded = _Loaded()


def load(files: Sequence[str], params: Sequence[str] = (), search_path: Sequence[str] = ()) -> None:
    """Reads and checks a config, in place of the one loaded before.

    A file, or one that it includes, may override what came before it; params come last. Files
    are looked for in the working directory, the search path and ddl's own folder; an include
    first of all beside the file that includes it.

    Args:
      files: Paths of config files.
      params: Single lines such as `NAME = value`.
      search_path: Further folders to look in.

    Raises:
      ConfigError: A file that cannot be read, or anything in it that cannot be right.
    """
    global _loaded
    _loaded = _Loaded()
    gin.clear_config()
    # A missing file or a slip in the grammar is told before Keras takes its seconds to import.
    reader = Reader(search_path)
    statements = [statement for file in files for statement in reader.file(file)]
    statements += [statement for param in params for statement in reader.parameter(param)]
    registry.register_all()
    # Modules first: what they register may be used above the import in another file.
    imports = [statement for statement in statements if isinstance(statement, Import)]
    for statement in imports:
        _import(statement)
    bindings = checked([statement for statement in statements if isinstance(statement, Binding)])
    bindings = {key: _with_float_rate(binding) for key, binding in bindings.items()}
    _loaded = _Loaded(bindings, list(dict.fromkeys(statement.module for statement in imports)))
    gin.parse_config(config_text())


def _with_float_rate(binding: Binding) -> Binding:
    """Keras refuses an integer as a learning rate; who writes 1 means 1.0."""
    is_rate = "LEARNING_RATE" in binding.key or binding.parameter.endswith("learning_rate")
    if is_rate and type(binding.value) is int:
        return dataclasses.replace(binding, value=float(binding.value))
    return binding


def _import(statement: Import) -> None:
    try:
        importlib.import_module(statement.module)
    except ImportError as error:
        raise ConfigError(
            statement.location.complain(
                f"Cannot import {statement.module}: {error}. "
                "Is it installed, or its folder on PYTHONPATH?"
            )
        ) from error


def get_macro(name: str) -> Any:
    """Returns a macro's value, which counts as using it; None when it is not defined."""
    if (name, MACRO_SELECTOR, "value") not in _loaded.bindings:
        return None
    return gin.get_configurable(f"{name}/{MACRO_SELECTOR}")()


def set_macro(name: str, value: Any) -> None:
    """Gives a macro a value that both saved texts will show, as one resolved at run time.

    Args:
      name: The macro, defined before or not.
      value: Something that a config can hold.
    """
    if not text.is_writable(value):
        raise ValueError(f"{name} = {value!r} cannot be written to a config")
    binding = Binding(name, MACRO_SELECTOR, "value", value)
    _loaded.bindings[binding.key] = binding
    gin.bind_parameter(binding.key, value)
    # Reading it is what puts it among the values used.
    get_macro(name)


def build(name: str, *args: Any, **kwargs: Any) -> Any:
    """Calls something registered, with what the config binds for it.

    Args:
      name: Its name, such as `RunPlan` or `train/images`.
      *args: Arguments that go before the config's.
      **kwargs: The same, by name.

    Raises:
      ConfigError: A value is missing or refused; the TypeError or ValueError is its cause.
    """
    return building.call(name, args, kwargs, _loaded.bindings)


def build_bound(name: str, parameter: str) -> Any:
    """Builds what the config binds for one parameter, ahead of the call that takes it.

    `build(name)` takes what was built here. So other values can follow from it (`set_macro`).

    Args:
      name: The name of what is called, without a scope.
      parameter: Its parameter.

    Returns:
      The value; None if nothing is bound.

    Raises:
      ConfigError: As `build`.
    """
    selector = full_selector(name)
    return building.explaining(
        lambda: registry.build_bound(selector, parameter), name, _loaded.bindings
    )


def check_all_used(allowed_unused: Sequence[str] = ()) -> None:
    """Checks that every binding and macro was used by a call so far; see `ddl.config.usage`.

    Args:
      allowed_unused: Names that may be unused, such as `Adam.beta_1` or `Adam.*`.

    Raises:
      ConfigError: Lists those that were not.
    """
    complaints = usage.complaints(_loaded.bindings, registry.calls(), allowed_unused)
    if complaints:
        raise ConfigError("\n".join(complaints))


def config_text() -> str:
    """Returns all that was bound, what was overridden left out."""
    return text.write(_loaded.imports, values_of(_loaded.bindings.values()))


def operative_config_text() -> str:
    """Returns all values used so far, defaults too; loading it again repeats the run.

    Only what was called is known: ask after everything is built.
    """
    values = {
        (scope, selector, parameter): value
        for (scope, selector), taken in registry.calls().items()
        for parameter, value in taken.items()
    }
    return text.write(_loaded.imports, values)


def differences(saved_text: str, ignore: Collection[str] = ()) -> list[str]:
    """Compares the config of an earlier run with this one, by what they mean.

    Defaults that ddl ships for what this run does not use are no difference: ask after everything
    is built.

    Args:
      saved_text: What `config_text` gave then.
      ignore: Bindings that may differ, by their shortest names, such as `RunPlan.train_steps`.

    Returns:
      Lines such as `cnn.filters: (32, 64) → (32,)`; what differs because a macro does is told
      once, by the macro's name.
    """
    statements = Reader().text(saved_text, "the saved config")
    saved = [with_full_selector(one) for one in statements if isinstance(one, Binding)]
    unused = usage.unused_defaults(_loaded.bindings, registry.calls())
    current = values_of(_loaded.bindings.values())
    return text.differences(values_of(saved), current, {*ignore, *map(shown, unused)})
