"""Detection of bindings that a run has not used.

A binding is used when at least one call took its value. A call in scope `a/b` takes a parameter
from the nearest of `a/b`, `a` and no scope; arguments passed by the caller are not taken from the
config. An item passed without being called (`@name` without parentheses) may be called at any
later time, so all its bindings and their references count as used.
"""

import fnmatch
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ddl.config import registry
from ddl.config.parsing import PACKAGE_FOLDER, hint_of_standard
from ddl.config.values import (
    MACRO_SELECTOR,
    Binding,
    Key,
    Macro,
    Reference,
    enclosing_scopes,
    full_selector,
    leaves,
    name_of,
    shown,
)
from ddl.errors import ConfigError, closest, did_you_mean, either

# Macros that a run reads or sets although no binding may refer to them.
_READ_BY_THE_RUN = {"SEED", "STEPS_PER_EPOCH", "TOTAL_STEPS"}

# Arguments of the Trainer that ddl.main passes from flags of the same names.
FROM_FLAGS = {
    *("strategy", "steps_per_loop", "data_on_device", "jit_compile", "shard_optimizer_state"),
}

_MOST_SHOWN = 20  # in an error

# gin's record: (scope, selector) of each call to the values that the call took.
Calls = Mapping[tuple[str, str], Mapping[str, Any]]


def unused(
    bindings: Mapping[Key, Binding], calls: Calls, allowed: Collection[str]
) -> dict[Key, Binding]:
    """Returns the bindings that were never used, unless they are allowed.

    Defaults shipped with ddl and macros set by the program are exempt.

    Args:
      bindings: The effective bindings.
      calls: The calls so far (`registry.calls`).
      allowed: Patterns of bindings that may be unused, such as `Adam.*`.
    """
    used = _used(bindings, calls)
    return {
        key: binding
        for key, binding in bindings.items()
        if key not in used
        and binding.location
        and not is_shipped(binding)
        and not _is_allowed(binding, allowed)
    }


def complaints(
    bindings: Mapping[Key, Binding],
    calls: Calls,
    found: Collection[Key],
    overridden: Sequence[Binding] = (),
) -> list[str]:
    """Returns a complaint for each of the unused bindings.

    Args:
      bindings: The effective bindings.
      calls: The calls so far (`registry.calls`).
      found: The keys of the unused bindings.
      overridden: Bindings that later ones override.
    """
    used = _used(bindings, calls)
    mentions = _Mentions(bindings.values())
    return [
        bindings[key].complain(
            _complaint(bindings[key], bindings, mentions, used, calls, overridden)
        )
        for key in found
    ]


def unreferenced_macros(bindings: Iterable[Binding], allowed: Collection[str]) -> list[str]:
    """Returns a complaint for each macro that no binding refers to, unless it is allowed.

    Unlike `complaints`, this needs no calls and no registered items.

    Args:
      bindings: All bindings, also those that others override.
      allowed: As in `complaints`.
    """
    bindings = list(bindings)
    mentions = _Mentions(bindings)
    referred = {scope for name in mentions.users for scope in enclosing_scopes(name)}
    referred |= _READ_BY_THE_RUN
    return [
        binding.location.complain(_unreferenced(binding.scope, referred, mentions))
        for binding in bindings
        if binding.is_macro
        and binding.location
        and binding.scope not in referred
        and not is_shipped(binding)
        and not _is_allowed(binding, allowed)
    ]


class _Mentions:
    """The names that bindings mention, collected once: a config may have thousands of macros.

    Attributes:
      users: The bindings that refer to a macro, by the macro's name.
      texts: A binding that holds a text, by the text.
      files: One binding of each file.
    """

    def __init__(self, bindings: Iterable[Binding]):
        self.users: dict[str, list[Key]] = {}
        self.texts: dict[str, Binding] = {}
        files: dict[str, Binding] = {}
        for binding in bindings:
            found = set(filter(lambda leaf: isinstance(leaf, (Macro, str)), leaves(binding.value)))
            for leaf in found:
                if isinstance(leaf, Macro):
                    self.users.setdefault(leaf.name, []).append(binding.key)
                else:
                    self.texts.setdefault(leaf, binding)
            if binding.location and binding.location.file:
                files.setdefault(binding.location.file, binding)
        self.files = list(files.values())


def _unreferenced(name: str, referred: Iterable[str], mentions: _Mentions) -> str:
    quoted = mentions.texts.get(f"%{name}")
    if quoted is not None:
        hint = f" '%{name}' at {quoted.location} is a text. Remove its quotation marks."
    else:
        hint = hint_of_standard(name, mentions.files) or did_you_mean(name, referred)
    return f"{name} is never used.{hint or f' Nothing refers to %{name}.'}"


def raise_complaints(complaints: list[str]) -> None:
    """Raises ConfigError with the complaints about unused bindings, if there are any."""
    if complaints:
        remedy = "Remove the unused bindings, or pass their names to --gin_allow_unused."
        shown_ones = complaints[:_MOST_SHOWN]
        if further := len(complaints) - len(shown_ones):
            shown_ones.append(
                f"{further:,} further bindings are unused, {len(complaints):,} in all."
            )
        raise ConfigError("\n".join([*shown_ones, remedy]))


def unused_defaults(bindings: Mapping[Key, Binding], calls: Calls) -> set[Key]:
    """Returns the keys of the shipped defaults that no call used."""
    used = _used(bindings, calls)
    return {key for key, binding in bindings.items() if key not in used and is_shipped(binding)}


def is_shipped(binding: Binding) -> bool:
    """Returns whether a binding is a default of a file shipped in ddl's package folder."""
    file = binding.location.file if binding.location else None
    return file is not None and os.path.dirname(os.path.abspath(file)) == PACKAGE_FOLDER


def _is_allowed(binding: Binding, patterns: Iterable[str]) -> bool:
    names = (shown(binding.key), name_of(binding.key))
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns for name in names)


def _used(bindings: Mapping[Key, Binding], calls: Calls) -> set[Key]:
    used: set[Key] = set()
    for (scope, selector), values in calls.items():
        for parameter in values:
            for enclosing in enclosing_scopes(scope):
                if (enclosing, selector, parameter) in bindings:
                    used.add((enclosing, selector, parameter))
                    break
    # A reference that a call took was called and recorded, unless it was passed uncalled.
    waiting = [(key, False) for key in used]
    while waiting:
        key, is_for_later = waiting.pop()
        for leaf in leaves(bindings[key].value):
            for found in _for_later(leaf, is_for_later, bindings):
                if found not in used:
                    used.add(found)
                    waiting.append((found, True))
    return used


def _for_later(leaf: Any, is_for_later: bool, bindings: Mapping[Key, Binding]) -> Iterator[Key]:
    """Yields the bindings that a later call of this part of a value may take."""
    if isinstance(leaf, Macro) and is_for_later:
        scopes: list[str] | None = list(enclosing_scopes(leaf.name))
        selector = MACRO_SELECTOR
    elif isinstance(leaf, Reference) and (is_for_later or not leaf.evaluate):
        scopes = list(enclosing_scopes(leaf.scope)) if leaf.scope else None
        selector = full_selector(leaf.selector)
    else:
        return
    for key in bindings:
        if key[1] == selector and (scopes is None or key[0] in scopes):
            yield key


def _complaint(
    binding: Binding,
    bindings: Mapping[Key, Binding],
    mentions: _Mentions,
    used: Collection[Key],
    calls: Calls,
    overridden: Sequence[Binding],
) -> str:
    what = f"{shown(binding.key)} is never used"
    if binding.is_macro:
        if referring := mentions.users.get(binding.scope):
            names = ", ".join(map(shown, referring))
            return f"{what}, and neither are the bindings that refer to it: {names}."
        others = [key[0] for key in used if key[1] == MACRO_SELECTOR]
        for one in overridden:
            if Macro(binding.scope) in leaves(one.value) and one.key in bindings:
                winner = bindings[one.key]
                return (
                    f"{what}: {shown(one.key)} refers to it at {one.location}, but is "
                    f"{winner.value!r} at {winner.location}. Remove that binding or this one."
                )
        return _unreferenced(binding.scope, others, mentions)
    name = registry.short_name(binding.selector)
    scopes = sorted({scope for scope, selector in calls if selector == binding.selector})
    if not scopes:
        called = {registry.short_name(selector) for _, selector in calls}
        hint = did_you_mean(name, called) or f" Refer to @{name}() in another binding."
        return f"{what}: nothing calls {name}.{hint}"
    if not any(binding.scope in enclosing_scopes(scope) for scope in scopes):
        all_scopes = {one for scope in scopes for one in enclosing_scopes(scope) if one}
        near = closest(binding.scope, all_scopes)
        keys = [shown((scope, binding.selector, binding.parameter)) for scope in near]
        places = either(f"in scope {scope}" if scope else "outside any scope" for scope in scopes)
        hint = f" Did you mean {either(keys)}?" if keys else ""
        return f"{what}: {name} is called {places}, not in scope {binding.scope}.{hint}"
    if name == "Trainer" and binding.parameter in FROM_FLAGS:
        return (
            f"{what}: the Trainer takes {binding.parameter} from the flag --{binding.parameter}. "
            "Pass the flag, and remove the binding."
        )
    return (
        f"{what}: each call of {name} takes {binding.parameter} from another binding or from its "
        "caller."
    )
