"""Unused bindings: all bindings minus those that gin's record of calls names.

A call in scope `a/b` takes a parameter from the nearest of `a/b`, `a` and no scope. An item passed
without being called (`@name`) may be called at any later time, so its bindings count as used.
"""

import fnmatch
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from ddl.config import registry
from ddl.config.statements import (
    MACRO,
    PACKAGE,
    SET_LATER,
    Binding,
    Key,
    Reference,
    complain,
    expand,
    macro_key,
    nearest,
    references,
)
from ddl.errors import ConfigError, did_you_mean

_STANDARD = PACKAGE / "standard.gin"


def unused(bindings: Mapping[Key, Binding], calls: Iterable[Key]) -> dict[Key, Binding]:
    """Returns the bindings that no call has used.

    Args:
      bindings: The effective bindings.
      calls: Scope, item and parameter of each value that a call has taken so far.
    """
    used = {found for key in calls if (found := nearest(key, bindings))}
    # A reference that a call took was called and recorded, unless it was passed uncalled.
    used |= _reachable(
        [one for key in used for one in references(bindings[key].value) if not one.evaluate],
        bindings,
    )
    return {key: binding for key, binding in bindings.items() if key not in used}


def _reachable(waiting: list[Reference], bindings: Mapping[Key, Binding]) -> set[Key]:
    """Returns the bindings that calls of some references may take, in any scope around them."""
    found: set[Key] = set()
    while waiting:
        reference = waiting.pop()
        selector = registry.full_name(reference.selector)
        for key, binding in bindings.items():
            is_around = not reference.scope or nearest((reference.scope, *key[1:]), [key])
            if key not in found and key[1] == selector and is_around:
                found.add(key)
                waiting += references(binding.value)
    return found


def superfluous(
    found: Collection[Key], given: Sequence[Binding], bindings: Mapping[Key, Binding]
) -> dict[Key, Binding]:
    """Returns the unused bindings of items that a later statement replaced by another item.

    Such as those of `SGD` after `Trainer.optimizer = @Adam()`, and those that only they refer to.
    A binding below the statement stays unused: it may be a typo.

    Args:
      found: Keys of the unused bindings.
      given: All bindings in the order of the files, with full names.
      bindings: The effective bindings.

    Returns:
      The binding that replaced the item, by the key of the superfluous binding.
    """
    reasons: dict[Key, Binding] = {}
    for old in given:
        new = bindings[old[:3]]
        gone = [one for one in references(old.value) if one not in references(new.value)]
        if gone and references(new.value):
            for key in _reachable(gone, bindings) & set(found):
                if given.index(bindings[key]) < given.index(new):
                    reasons[key] = new
    return reasons


def check_defined(bindings: Sequence[Binding], files: Collection[str]) -> None:
    """Checks that each macro that a binding refers to has a value, of which it is no part.

    Args:
      bindings: All bindings.
      files: Absolute paths of the files read.

    Raises:
      ConfigError: Lists the undefined macros and the cycles.
    """
    known = {one[:3]: one for one in bindings}
    names = [one.scope for one in bindings if one.selector == MACRO]
    problems = []
    for binding in bindings:
        for macro in references(binding.value):
            is_open = macro.selector == MACRO and macro_key(macro, known) is None
            if is_open and not registry.is_constant(macro.scope):
                hint = of_standard(macro.scope, files) or did_you_mean(macro.scope, names)
                what = f"{macro!r} is not defined.{hint or f' Add a line {macro.scope} = ….'}"
                problems.append(complain(binding.location, what))
        try:
            expand(binding.value, known)
        except RecursionError:
            cycle = f"%{binding.scope} -> {binding.value!r}"
            what = f"Macros refer to each other in a cycle: {cycle}. Give one of them a value."
            problems.append(complain(binding.location, what))
    raise_if_any(problems)


def raise_if_any(problems: Iterable[str]) -> None:
    """Raises ConfigError that lists the problems, without empty texts, if there are any."""
    if found := list(dict.fromkeys(filter(None, problems))):
        raise ConfigError("\n".join(found))


def check_macros(
    bindings: Sequence[Binding], files: Collection[str], allowed: Collection[str]
) -> None:
    """Checks that a binding refers to each macro, for which no item needs to be registered.

    Args:
      bindings: All bindings.
      files: Absolute paths of the files read.
      allowed: Patterns of names that may be unused.

    Raises:
      ConfigError: Lists the macros that nothing refers to.
    """
    names = [one.scope for b in bindings for one in references(b.value) if one.selector == MACRO]
    used = [(name, MACRO, "value") for name in (*names, *SET_LATER)]
    macros = {one[:3]: one for one in bindings if one.selector == MACRO}
    found = [one for one in unused(macros, used).values() if not is_allowed(one, allowed)]
    raise_unused(found, used, files)


def raise_unused(found: Sequence[Binding], used: Iterable[Key], files: Collection[str]) -> None:
    """Raises ConfigError that lists the unused bindings with a suggestion, if there are any.

    Args:
      found: The unused bindings.
      used: Keys of what is used.
      files: Absolute paths of the files read.
    """
    names = {registry.shown(key) for key in used}
    lines = []
    for binding in found[:20]:
        name = registry.shown(binding[:3])
        hint = of_standard(name, files) or did_you_mean(name, names)
        hint = hint or " Nothing refers to it, or another binding, a flag or a caller sets it."
        lines.append(complain(binding.location, f"{name} is never used.{hint}"))
    remedy = f"Remove the unused bindings ({len(found)}), or allow them by --gin_allow_unused."
    raise_if_any([*lines, remedy] if lines else [])


def of_standard(name: str, files: Collection[str]) -> str:
    """Returns the advice to include standard.gin if it defines a macro and was not read; or ""."""
    defined = re.search(rf"^{re.escape(name)} =", _STANDARD.read_text(), re.MULTILINE)
    is_read = str(_STANDARD) in files
    return " Add include 'standard.gin' as the first line." if defined and not is_read else ""


def is_allowed(binding: Binding, patterns: Iterable[str] = ()) -> bool:
    """Returns whether a binding may be unused: it is shipped, the program's, or allowed by name."""
    if binding.location is None or Path(binding.location.filename or ".").parent == PACKAGE:
        return True
    return any(fnmatch.fnmatchcase(registry.shown(binding[:3]), pattern) for pattern in patterns)
