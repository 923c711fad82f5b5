"""Bindings of an included config that the including config makes superfluous.

A config that includes another may replace a reference, such as `Trainer.optimizer = @FusedSGD()`
by `@LAMB()`. The bindings of `FusedSGD` in the included files then may go unused, and so may those
that only they refer to. All other unused bindings stay errors, also those in the including file.
"""

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from ddl.config.values import (
    MACRO_SELECTOR,
    Binding,
    Key,
    Macro,
    Reference,
    enclosing_scopes,
    full_selector,
    leaves,
    shown,
)

_SHOWN = 4


@dataclasses.dataclass(frozen=True)
class Replacement:
    """A reference in an included file that an including file replaced.

    Attributes:
      leaf: The reference, or a macro that stands for one.
      by: The binding that replaced it.
    """

    leaf: Reference | Macro
    by: Binding


def replacements(
    bindings: Sequence[Binding], effective: Mapping[Key, Binding]
) -> Iterator[Replacement]:
    """Yields the references that including files replaced.

    Args:
      bindings: All bindings in the order of the files, with full selectors.
      effective: The effective bindings.
    """
    for old in bindings:
        new = effective[old.key]
        if not _is_included(old, new):
            continue
        kept = set(map(_identity, leaves(new.value)))
        for leaf in leaves(old.value):
            is_reference = isinstance(leaf, Reference) or (
                isinstance(leaf, Macro) and _holds_references(leaf, effective)
            )
            if is_reference and _identity(leaf) not in kept:
                yield Replacement(leaf, new)


def superfluous(
    unused: Mapping[Key, Binding],
    calls: Collection[tuple[str, str]],
    replaced: Sequence[Replacement],
) -> dict[Key, Replacement]:
    """Returns the unused bindings that may go unused, with the replacement that is the reason.

    Args:
      unused: The bindings that no call used.
      calls: Scope and selector of each call.
      replaced: The replaced references.
    """
    found: dict[Key, Replacement] = {}
    waiting: list[tuple[Any, Replacement]] = [(one.leaf, one) for one in replaced]
    while waiting:
        leaf, reason = waiting.pop()
        for key, binding in unused.items():
            if key not in found and _belongs(key, leaf, calls) and _is_included(binding, reason.by):
                found[key] = reason
                further = [x for x in leaves(binding.value) if isinstance(x, Reference | Macro)]
                waiting += [(each, reason) for each in further]
    return found


def lines(found: Mapping[Key, Replacement]) -> list[str]:
    """Returns a line for each replacement, with the bindings that go unused."""
    by_reason: dict[str, list[str]] = {}
    for key, reason in found.items():
        by_reason.setdefault(f"{reason.by.location} replaces {reason.leaf!r}", []).append(
            shown(key)
        )
    return [
        f"{reason}, so these included bindings have no effect: {', '.join(names[:_SHOWN])}"
        + (f" and {len(names) - _SHOWN} more." if len(names) > _SHOWN else ".")
        for reason, names in by_reason.items()
    ]


def _is_included(binding: Binding, by: Binding) -> bool:
    """Returns whether a binding stands in a file that the file of `by` includes."""
    if not binding.location or not by.location or not by.location.reading:
        return False
    return by.location.reading[-1] in binding.location.reading[:-1]


def _belongs(key: Key, leaf: Any, calls: Collection[tuple[str, str]]) -> bool:
    """Returns whether a binding could only be used through this leaf."""
    scope, selector, _ = key
    if isinstance(leaf, Macro):
        return selector == MACRO_SELECTOR and scope in enclosing_scopes(leaf.name)
    return (
        selector == full_selector(leaf.selector)
        and scope in enclosing_scopes(leaf.scope)
        and not any(
            called == selector and scope in enclosing_scopes(where) for where, called in calls
        )
    )


def _holds_references(macro: Macro, effective: Mapping[Key, Binding]) -> bool:
    binding = effective.get((macro.name, MACRO_SELECTOR, "value"))
    return binding is not None and any(isinstance(x, Reference) for x in leaves(binding.value))


def _identity(leaf: Any) -> Any:
    if isinstance(leaf, Reference):
        return leaf.scope, full_selector(leaf.selector)
    return leaf.name if isinstance(leaf, Macro) else None
