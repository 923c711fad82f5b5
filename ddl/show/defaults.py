"""The defaults of the items that a config refers to."""

import dataclasses
from collections.abc import Iterator, Mapping

from ddl.config import registry
from ddl.config.explained.items import describe_item
from ddl.config.explained.provenance import items_in_use
from ddl.config.values import Binding, Key, shown
from ddl.run.placement import Placement


def defaults_of(bindings: Mapping[Key, Binding]) -> Iterator[tuple[str, str]]:
    """Yields name and default of each parameter that no binding sets.

    Args:
      bindings: The effective bindings.
    """
    set_elsewhere = {(selector, parameter) for _, selector, parameter in bindings}
    # The flags set these.
    set_elsewhere |= {("ddl.Trainer", field.name) for field in dataclasses.fields(Placement)}
    for selector in items_in_use(bindings.values()):
        for found in registry.matches(selector):
            for parameter in describe_item(found).parameters:
                is_set = (selector, parameter.name) in set_elsewhere
                if parameter.default is not None and not is_set:
                    yield shown(("", selector, parameter.name)), parameter.default
