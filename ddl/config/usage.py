"""Unused bindings: all bindings minus those that gin's record of calls names.

A call in scope `a/b` takes a parameter from the nearest of `a/b`, `a` and no scope. An item passed
without being called (`@name`) may be called at any later time, so its bindings count as used.
"""

import fnmatch
import re
from collections.abc import Collection, Iterable, Sequence
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from ddl.config import registry, statements
from ddl.config.statements import MACRO, Binding, Bindings, Key, complain, nearest, references
from ddl.errors import did_you_mean


def unused(bindings: Bindings, calls: Iterable[Key]) -> dict[Key, Binding]:
    """Returns the bindings that no call has used.

    Args:
      bindings: The effective bindings.
      calls: Scope, item and parameter of each value that a call has taken so far.
    """
    used = {found for key in calls if (found := nearest(key, bindings))}
    # A reference that a call took was called and recorded, unless it was passed uncalled.
    later = [one for key in used for one in references(bindings[key].value) if not one.evaluate]
    used |= _reachable(later, bindings)
    return {key: binding for key, binding in bindings.items() if key not in used}


def _reachable(waiting: list[statements.Reference], bindings: Bindings) -> set[Key]:
    """Returns the bindings that calls of some references may take, in any scope around them."""
    found: set[Key] = set()
    while waiting:
        scope, name, _ = waiting.pop()
        for key in [x for x in bindings if x[1] == registry.full_name(name) and x not in found]:
            if not scope or nearest((scope, *key[1:]), [key]):
                found.add(key)
                waiting += references(bindings[key].value)
    return found


def superfluous(
    found: Collection[Key], given: Sequence[Binding], bindings: Bindings
) -> dict[Key, Binding]:
    """Returns the unused bindings of items that a later statement replaced by another value.

    Such as those of `SGD` after `Trainer.optimizer = @Adam()`, or "adam", and those that only they
    refer to.
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
        new = bindings.get(old[:3], old)
        gone = [one for one in references(old.value) if one not in references(new.value)]
        for key in _reachable(gone, bindings) if new.value is not None else ():
            if key in found and given.index(bindings[key]) < given.index(new):
                reasons[key] = new
    return reasons


def check_macros(given: Sequence[Binding], allowed: Iterable[str] | None) -> None:
    """Checks that each macro is defined and referred to, for which no item needs to be registered.

    Args:
      given: All bindings.
      allowed: Patterns of names that may be unused; None allows all.

    Raises:
      ConfigError: Lists the macros that are not defined or unused, and values that need themselves.
    """
    macros = {one[:3]: one for one in given if one.selector == MACRO}
    used = [statements.SEED]
    problems = []
    for binding in given:
        for macro in [one for one in references(binding.value) if one.selector == MACRO]:
            used.append((macro.scope, MACRO, "value"))
            if not nearest(used[-1], macros) and not registry.is_constant(macro.scope):
                hint = did_you_mean(macro.scope, [key[0] for key in macros])
                hint = of_standard(macro.scope, given) or hint or f" Add a line {macro.scope} = …."
                problems.append(complain(binding.location, f"{macro!r} is not defined.{hint}"))
    circle = _circle({one[:3]: one for one in given})
    names = ", ".join(f"{registry.shown(one[:3])} = {one.value!r}" for one in circle)
    what = f"This value needs itself, by {names}. Write a number or another value."
    problems += [complain(one.location, what) for one in circle if not is_allowed(one)]
    statements.raise_if_any(problems)
    found = () if allowed is None else unused(macros, used).values()
    raise_unused([one for one in found if not is_allowed(one, allowed or ())], used, given)


def _circle(bindings: Bindings) -> list[Binding]:
    """Returns bindings of which each calls the item of the next one, and the last one's the first.

    Empty if there are none. A call in a scope counts the bindings of this scope alone.
    """
    graph: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for key, binding in bindings.items():
        graph[key] = [one[:2] for one in references(binding.value) if one.evaluate]
        graph.setdefault(key[:2], []).append(key)
    try:
        TopologicalSorter(graph).prepare()
        return []
    except CycleError as error:
        return [bindings[key] for key in error.args[1][:0:-1] if key in bindings]


def raise_unused(found: Sequence[Binding], used: Iterable[Key], given: Sequence[Binding]) -> None:
    """Raises ConfigError that lists the unused bindings with a suggestion, if there are any.

    Args:
      found: The unused bindings.
      used: Keys of what is used.
      given: All bindings.
    """
    lines = []
    for name, location in ((registry.shown(one[:3]), one.location) for one in found[:20]):
        hint = of_standard(name, given) or did_you_mean(name, map(registry.shown, used))
        hint = hint or " Nothing refers to it, or another binding, a flag or a caller sets it."
        lines.append(complain(location, f"{name} is never used.{hint}"))
    remedy = f"Remove the unused bindings ({len(found)}), or allow them by --gin_allow_unused."
    statements.raise_if_any([*lines, remedy] if lines else ())


def of_standard(name: str, given: Sequence[Binding]) -> str:
    """Returns the advice to include standard.gin if it defines a macro and was not read; or ""."""
    text = (statements.PACKAGE / "standard.gin").read_text()
    lacks = re.search(rf"(?m)^{re.escape(name)} =", text) and not any(map(is_allowed, given))
    return " Add include 'standard.gin'." if lacks else ""


def is_allowed(binding: Binding, patterns: Iterable[str] = ()) -> bool:
    """Returns whether a binding may be unused: it is shipped, the program's, or allowed by name."""
    at = binding.location
    is_own = at is None or Path(at.filename).parent == statements.PACKAGE
    return is_own or any(fnmatch.fnmatchcase(registry.shown(binding[:3]), x) for x in patterns)
