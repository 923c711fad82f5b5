"""The registered items with their parameters, types, defaults and documentation."""

import dataclasses
import functools
import inspect
import re
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from ddl.config import registry
from ddl.config.explained.kinds import kind_of
from ddl.config.fitting import describe
from ddl.config.signatures import UNKNOWN, signature_of

# The modules before the name of a class, such as keras.src.models.model. in its annotation.
_MODULES = re.compile(r"(?<![\w.'\"])(?:[a-z_]\w*\.)+(?=[A-Za-z_])")
# typing's repr of a union of None with a Literal.
_OPTIONAL = re.compile(r"^Optional\[(.*)\]$")
# The address in the repr of an object.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_SECTIONS = ("Args:", "Arguments:", "Attributes:")


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A parameter of an item.

    Attributes:
      name: Its name.
      type: Its annotation as text; empty without one.
      default: Its default as text; None if a value is required.
      doc: Its description in the docstring; may be empty.
    """

    name: str
    type: str
    default: str | None
    doc: str

    def __str__(self) -> str:
        text = f"{self.name}: {self.type}" if self.type else self.name
        if self.default is None:
            return text
        return f"{text} = {self.default}" if self.type else f"{text}={self.default}"


@dataclasses.dataclass(frozen=True)
class Item:
    """A function or class that a config can name.

    Attributes:
      name: The shortest name that is not ambiguous, as a config writes it after the @.
      selector: The full name.
      kind: Its kind, a key of `ddl.config.explained.kinds.KINDS`.
      parameters: The parameters that a config can bind.
      inherited: Further parameters, which a base class takes.
      doc: The whole docstring, of a class with that of its constructor.
    """

    name: str
    selector: str
    kind: str
    parameters: tuple[Parameter, ...]
    inherited: tuple[str, ...]
    doc: str

    @property
    def summary(self) -> str:
        """First sentence or paragraph of the docstring, on one line; may be empty."""
        return " ".join(self.doc.partition("\n\n")[0].split())

    @property
    def origin(self) -> str:
        """`ddl`, `keras`, or the package of the user's that registered the item."""
        return self.selector.partition(".")[0]


def items() -> list[Item]:
    """Returns all registered items: ddl's, then those of users, then Keras's, each by name."""
    registry.register_all()
    found = [describe_item(each) for each in registry.items()]
    order = {"ddl": 0, "keras": 2}
    return sorted(found, key=lambda item: (order.get(item.origin, 1), item.name.lower(), item.name))


def describe_item(registered: Any) -> Item:
    """Returns the description of an item as `registry.items` returns it."""
    wrapped = registered.wrapped
    signature = signature_of(wrapped)
    doc = _documentation(wrapped)
    documented: dict[str, str] = {}
    # A parameter that a class passes on may be described by its base class alone.
    for each in inspect.getmro(wrapped) if inspect.isclass(wrapped) else [wrapped]:
        documented = _documented(_documentation(each)) | documented
    names = [name for name in signature.annotations if _may_be_bound(registered, name)]
    return Item(
        name=registry.short_name(registered.selector),
        selector=registered.selector,
        kind=kind_of(wrapped, registered.selector),
        parameters=tuple(
            Parameter(
                name,
                type_text(signature.annotations[name]),
                default_text(signature.defaults[name]) if name in signature.defaults else None,
                documented.get(name, ""),
            )
            for name in names
        ),
        inherited=tuple(sorted(signature.inherited - {"args", "kwargs", "self", *names})),
        doc=doc,
    )


def _may_be_bound(registered: Any, name: str) -> bool:
    if registered.allowlist:
        return name in registered.allowlist
    return not registered.denylist or name not in registered.denylist


def type_text(annotation: Any) -> str:
    """Returns an annotation without the modules of its classes; "" if there is none."""
    text = "" if annotation is UNKNOWN else _MODULES.sub("", describe(annotation))
    return _OPTIONAL.sub(r"\1 | None", text)


def default_text(value: Any) -> str:
    """Returns a default as it would be written, functions and classes by their names."""
    if inspect.isclass(value) or inspect.isroutine(value):
        return str(getattr(value, "__name__", value))
    return _ADDRESS.sub("", " ".join(repr(value).split()))


@functools.cache
def _documentation(wrapped: Any) -> str:
    """Returns the docstring; of a class, its own followed by that of its constructor."""
    parts = [inspect.cleandoc(wrapped.__doc__ or "")]
    if inspect.isclass(wrapped):
        own = vars(wrapped).get("__init__")
        parts.append(inspect.cleandoc(getattr(own, "__doc__", None) or ""))
        if parts[0].startswith(f"{wrapped.__name__}("):  # made by dataclasses from the signature
            parts[0] = ""
    return "\n\n".join(part for part in parts if part)


def _documented(doc: str) -> dict[str, str]:
    """Returns what the sections Args and Attributes of a docstring say, by parameter name."""
    found: dict[str, str] = {}
    lines = doc.splitlines()
    for number, line in enumerate(lines):
        if line.strip() in _SECTIONS:
            for name, text in _entries(lines[number + 1 :], _indent(line)):
                found.setdefault(name, text)
    return found


def _entries(lines: Sequence[str], outside: int) -> Iterator[tuple[str, str]]:
    """Yields name and text of each entry of a section."""
    block = []
    for line in lines:
        if line.strip() and _indent(line) <= outside:
            break
        block.append(line)
    name, texts = "", list[str]()
    for line in textwrap.dedent("\n".join(block)).splitlines():
        begins = re.match(r"\*{0,2}`?(\w+)`?(?: ?\([^)]*\))?: *(.*)", line)
        if begins:
            if name:
                yield name, " ".join(" ".join(texts).split())
            name, texts = begins[1], [begins[2]]
        else:
            texts.append(line)
    if name:
        yield name, " ".join(" ".join(texts).split())


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())
