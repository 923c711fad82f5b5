"""Writes the API pages from the docstrings of the public names: `python docs/api/write.py`."""

import importlib
import inspect
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

import ddl
from ddl.errors import DdlError

FOLDER = Path(__file__).parent
MEMBERS = (FunctionType, MethodType, property)
HOMES = {
    "ddl": "Trainer, runs, tasks, callbacks, and what a step works with",
    "ddl.data": "sources, streams and readers",
    "ddl.models": "models",
    "ddl.metrics": "metrics that are no means",
    "ddl.optimizers": "optimizers, schedules, parameter groups",
    "ddl.layers": "layers that Keras lacks",
    "ddl.random": "random numbers of an owner",
    "ddl.precision": "precision of numbers",
    "ddl.distribution": "devices and strategies",
    "ddl.checking": "the check of a task",
    "ddl.run.trackers": "services that get figures",
    "ddl.errors": "errors and their exit statuses",
}
NAMES = {
    "ddl.precision": ["set_precision", "set_tf32"],
    "ddl.run.trackers": ["MLflow", "WeightsAndBiases"],
    "ddl.errors": [error.__name__ for error in DdlError.__subclasses__()],
}
"""Public names of modules whose other names are ddl's own."""


def signature(item: Any) -> str:
    """Returns the arguments of a class or function, with their defaults and without types."""
    try:
        found = inspect.signature(item)
    except ValueError:
        return "(…)"
    plain = [each.replace(annotation=each.empty) for each in found.parameters.values()]
    text = re.sub(r"<[^<>]*(<[^<>]*>[^<>]*)?>", "…", str(inspect.Signature(plain)))
    return re.sub(r"^\(self(, )?", "(", text)


def entry(name: str, item: Any, level: str = "##") -> Iterator[str]:
    """Yields heading, arguments and docstring of a name, then those of a class's own members."""
    short, is_class = name.rpartition(".")[2], inspect.isclass(item)
    own = item.__init__.__doc__ if is_class and "__init__" in vars(item) else None
    texts = [inspect.cleandoc(text) for text in (item.__doc__, own) if text]
    head = [] if isinstance(item, property) else [f"{short}{signature(item)}"]
    yield f"{level} `{name}`\n\n```text\n" + "\n\n".join([*head, *texts]) + "\n```\n"
    for key in [key for key in vars(item) if key[0] != "_"] if is_class else ():
        member = getattr(item, key)
        if getattr(member, "__doc__", None) and isinstance(member, MEMBERS):
            yield from entry(f"{short}.{key}", member, f"{level}#")


def public(home: str) -> dict[str, Any]:
    """Returns the public names of a module; those of `ddl` itself stand on its page alone."""
    module = importlib.import_module(home)
    names = NAMES.get(home) or getattr(module, "__all__", dir(module))
    elsewhere = {*ddl.__all__} if home != "ddl" else {"__version__"}
    return {name: getattr(module, name) for name in sorted({*names} - elsewhere)}


def pages() -> dict[str, str]:
    """Returns the text of each page by the name of its file."""
    lines = [f"| [{home}]({home}.md) | {what} |" for home, what in HOMES.items()]
    found = {"README.md": "\n".join(["# API\n", "| module | content |", "|---|---|", *lines, ""])}
    for home in HOMES:
        parts = [entry(f"{home}.{name}", item) for name, item in public(home).items()]
        found[f"{home}.md"] = "\n".join([f"# {home}\n", *itertools.chain(*parts)])
    return found


if __name__ == "__main__":
    for file, text in pages().items():
        (FOLDER / file).write_text(text)
