"""Configs as text: written so that they can be read back, and compared by what they mean."""

import tokenize
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from ddl import registry
from ddl.config.checks import macros_of, shown
from ddl.config.parsing import parse_value
from ddl.config.signatures import signature_of
from ddl.config.values import (
    MACRO_SELECTOR,
    Binding,
    Key,
    Macro,
    Reference,
    enclosing_scopes,
    expand,
    format_value,
    leaves,
    map_leaves,
)

_NOT_SET = object()


def write(imports: Iterable[str], values: Mapping[Key, Any]) -> str:
    """Returns the text that binds these values: imports, macros, then one block for each name."""
    blocks: dict[str, list[str]] = {}
    for module in imports:
        blocks.setdefault("imports", []).append(f"import {module}")
    for key in sorted(values, key=_order):
        block = "macros" if key[1] == MACRO_SELECTOR else f"{key[0]}/{key[1]}"
        blocks.setdefault(block, []).append(_line(shown(key), values[key]))
    return "\n\n".join("\n".join(dict.fromkeys(lines)) for lines in blocks.values()) + "\n"


def _order(key: Key) -> tuple[bool, str, Key]:
    return key[1] != MACRO_SELECTOR, registry.short_name(key[1]).lower(), key


def _line(name: str, value: Any) -> str:
    text = format_value(value, width=100 - len(name) - 3)
    if is_writable(value):
        # A continued line must be indented deeper than the name it belongs to.
        return f"{name} = " + text.replace("\n", "\n    ")
    return f"# {name} is no value that a config can hold: " + " ".join(repr(value).split())


def is_writable(value: Any) -> bool:
    """Whether a value survives being written and read back."""
    try:
        return repr(parse_value(format_value(value))) == repr(value)
    except (SyntaxError, tokenize.TokenError):
        return False


def differences(
    saved: Mapping[Key, Binding], current: Mapping[Key, Binding], ignore: Collection[str]
) -> list[str]:
    """Returns a line for each value that differs: ``cnn.filters: (32, 64) → not set``.

    Values are compared with their macros replaced, and where one config says nothing with what
    would be used instead: the binding of an enclosing scope, or the parameter's default. What
    differs only because a macro does is told once, at the macro.

    Args:
        saved: The bindings of the earlier config.
        current: Those of this one.
        ignore: Names of macros that may differ.
    """
    lines = []
    for key in sorted({*saved, *current}, key=_order):
        if key[1] == MACRO_SELECTOR and (
            key[0] in ignore or _is_other_spelling(key, saved, current)
        ):
            continue
        if key in saved and key in current:
            raw_before, raw_after = saved[key].value, current[key].value
            if raw_before == raw_after and any(isinstance(x, Macro) for x in leaves(raw_after)):
                continue
        before, after = _effective(key, saved), _effective(key, current)
        if _comparable(before) != _comparable(after):
            lines.append(f"{shown(key)}: {_written(before)} → {_written(after)}")
    return lines


def _is_other_spelling(
    key: Key, saved: Mapping[Key, Binding], current: Mapping[Key, Binding]
) -> bool:
    """Whether only one config has the macro, and bindings that use it tell what it changes."""
    if (key in saved) == (key in current):
        return False
    bindings = (saved if key in saved else current).values()
    return any(Macro(key[0]) in leaves(binding.value) for binding in bindings)


def _effective(key: Key, bindings: Mapping[Key, Binding]) -> Any:
    scope, selector, parameter = key
    for enclosing in enclosing_scopes(scope):
        binding = bindings.get((enclosing, selector, parameter))
        if binding:
            return expand(binding.value, macros_of(bindings.values()))
        if selector == MACRO_SELECTOR:
            break
    found = registry.matches(selector)
    defaults = signature_of(found[0].wrapped).defaults if len(found) == 1 else {}
    default = defaults.get(parameter, _NOT_SET)
    return default if default is _NOT_SET or is_writable(default) else _NOT_SET


def _comparable(value: Any) -> Any:
    def full(leaf: Any) -> Any:
        if isinstance(leaf, Reference):
            found = registry.matches(leaf.selector)
            selector = found[0].selector if len(found) == 1 else leaf.selector
            return Reference(leaf.scope, selector, leaf.evaluate)
        # True == 1 in Python; 1 == 1.0 is no difference to a run.
        return (bool, leaf) if isinstance(leaf, bool) else leaf

    return map_leaves(value, full)


def _written(value: Any) -> str:
    return "not set" if value is _NOT_SET else repr(value)


def operative_values(
    calls: Mapping[tuple[str, str], Mapping[str, Any]],
) -> Iterator[tuple[Key, Any]]:
    """Yields what the calls so far took from the config, or from literal defaults."""
    for (scope, selector), values in calls.items():
        for parameter, value in values.items():
            yield (scope, selector, parameter), value
