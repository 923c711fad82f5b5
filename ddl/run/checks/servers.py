"""Where the variables of a run lie: the bytes of each parameter server."""

import re
from collections.abc import Iterable
from typing import Any

import keras

from ddl.distribution.traits import traits_of
from ddl.optimizers.groups import by_name
from ddl.tasks.parts import layers_of
from ddl.training.trainer import Trainer

_LARGE = 2**26
"""Bytes of a variable from which it matters which server holds it."""


def bytes_of_servers(trainer: Trainer) -> dict[str, str]:
    """Returns the bytes that each parameter server holds, as a text by name; {} without servers."""
    if not traits_of(trainer.strategy).asynchronous:
        return {}
    held = _held(_variables(trainer), trainer.strategy.extended._num_ps)
    texts = [f"{number} holds {size / 1e6:,.3g} MB" for number, size in enumerate(held)]
    return {"parameter servers": ", ".join(texts)}


def unevenly_held(trainer: Trainer) -> list[str]:
    """Returns a note on each large variable that exceeds a server's share of all variables."""
    if not traits_of(trainer.strategy).asynchronous:
        return []
    variables = _variables(trainer)
    return notes_on(variables, trainer.strategy.extended._num_ps)


def notes_on(variables: Iterable[Any], servers: int) -> list[str]:
    """Returns the notes of `unevenly_held`.

    Args:
      variables: All variables of the run: Keras's, or `tf.Variable`.
      servers: Number of parameter servers.
    """
    variables = list(variables)
    share = sum(map(_bytes, variables)) / servers
    return [
        f"Parameter server {_server(v)} holds the whole variable {_name(v)}, "
        f"{_bytes(v) / 1e6:,.3g} MB, which is more than its share of all variables, "
        f"{share / 1e6:,.3g} MB. Make a large table of several smaller ones "
        "(docs/parameter-servers.md)."
        for v in variables
        if servers > 1 and _bytes(v) > max(share, _LARGE)
    ]


def _variables(trainer: Trainer) -> list[Any]:
    """Returns all variables of model, optimizer and averages, each once."""
    found = [v for layer in layers_of(trainer.task) for v in layer.variables]
    found += [v for one in by_name(trainer.optimizer).values() for v in one.variables]
    found += list(trainer.averages.variables) if trainer.averages else []
    return list({id(_plain(v)): v for v in found}.values())


def _held(variables: Iterable[Any], servers: int) -> list[int]:
    """Returns the bytes that each server holds."""
    held = [0] * servers
    for variable in variables:
        held[_server(variable)] += _bytes(variable)
    return held


def _server(variable: Any) -> int:
    found = re.search(r"/job:ps/.*task:(\d+)", _plain(variable).device)
    return int(found[1]) if found else 0


def _bytes(variable: Any) -> int:
    plain = _plain(variable)
    return int(plain.shape.num_elements()) * plain.dtype.size


def _name(variable: Any) -> str:
    return getattr(variable, "path", variable.name)


def _plain(variable: Any) -> Any:
    return variable.value if isinstance(variable, keras.Variable) else variable
