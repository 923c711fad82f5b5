"""Origin of each value of a config, and the values that it overrides."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ddl.config.text import order_of
from ddl.config.values import (
    MACRO_SELECTOR,
    Binding,
    Key,
    Macro,
    Reference,
    expand,
    full_selector,
    leaves,
    macros_of,
    shown,
    values_of,
)

# What every run builds.
_ROOTS = ("ddl.Trainer", "ddl.RunPlan", "ddl.set_numerics")


@dataclasses.dataclass(frozen=True)
class Provenance:
    """A value of a config with its history.

    Attributes:
      name: Left-hand side of the binding, such as `Trainer.clip_norm` or `SEED`.
      block: Heading of its block: `macros`, or the item with its scope.
      binding: The effective binding.
      value: Its value, with macros replaced by theirs.
      overridden: The bindings that it overrides, the last one first.
    """

    name: str
    block: str
    binding: Binding
    value: Any
    overridden: tuple[Binding, ...]

    @property
    def has_macros(self) -> bool:
        """Whether the binding refers to a macro, so that `value` says more than it."""
        return any(isinstance(leaf, Macro) for leaf in leaves(self.binding.value))


def provenance(bindings: Mapping[Key, Binding], overridden: Sequence[Binding]) -> list[Provenance]:
    """Returns each effective binding with its history: macros first, then by item.

    Args:
      bindings: The effective bindings by key.
      overridden: The bindings that later ones override, in the order of the files.
    """
    macros = macros_of(values_of(bindings.values()))
    earlier: dict[Key, list[Binding]] = {}
    for binding in overridden:
        # A file that two others include is read twice, and yields the same lines again.
        known = [one.location for one in earlier.get(binding.key, [])]
        if binding.location not in known and binding.location != bindings[binding.key].location:
            earlier.setdefault(binding.key, []).insert(0, binding)
    return [
        Provenance(
            shown(key),
            "macros" if key[1] == MACRO_SELECTOR else f"{key[0]}/{key[1]}",
            bindings[key],
            expand(bindings[key].value, macros),
            tuple(earlier.get(key, ())),
        )
        for key in sorted(bindings, key=order_of)
    ]


def items_in_use(bindings: Iterable[Binding]) -> list[str]:
    """Returns the full names of the items that a run builds, or that a binding refers to."""
    references = [
        leaf
        for binding in bindings
        for leaf in leaves(binding.value)
        if isinstance(leaf, Reference)
    ]
    found = [*_ROOTS, *(full_selector(reference.selector) for reference in references)]
    return list(dict.fromkeys(found))
