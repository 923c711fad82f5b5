"""Lookup of the names given to `ddl list`. Imports TensorFlow only for items of configs."""

from collections.abc import Iterator, Sequence

from absl import flags

from ddl.cli import subcommands
from ddl.cli.flags import flags_of
from ddl.cli.loading import prepare
from ddl.cli.terminal import emphasized, wrapped
from ddl.config.explained.items import Item, items
from ddl.config.explained.kinds import KINDS
from ddl.config.explained.macros import StandardMacro, shipped_configs, standard_macros
from ddl.errors import ConfigError, did_you_mean
from ddl.list import text

# The lists that are not of items, with the phrases that describe them.
OTHERS = {
    "macros": "the upper-case names of standard.gin",
    "flags": "flags of all commands",
    "configs": "configs that come with ddl",
    "commands": "subcommands of ddl",
}


def listing(
    names: Sequence[str],
    gin_files: Sequence[str],
    gin_params: Sequence[str],
    search_path: Sequence[str],
    columns: int | None,
) -> Iterator[str]:
    """Yields the lines of `ddl list`.

    Args:
      names: Names to list; nothing lists all kinds.
      gin_files: Configs whose imported modules add items.
      gin_params: Single statements, which may import modules too.
      search_path: Folders to search for configs.
      columns: The width; None for long lines.

    Raises:
      ConfigError: If a name is unknown, or a module cannot be imported.
    """
    found = _Names(gin_files, gin_params, search_path, columns)
    if not names:
        yield from text.kinds(found.items, OTHERS, columns)
    for number, name in enumerate(names):
        if number:
            yield ""
        yield from found.lines(name)


class _Names:
    """The names, with the items loaded when one is asked for."""

    def __init__(
        self,
        gin_files: Sequence[str],
        gin_params: Sequence[str],
        search_path: Sequence[str],
        columns: int | None,
    ):
        self._given = gin_files, gin_params, search_path
        self._columns = columns
        self._items: list[Item] | None = None

    @property
    def items(self) -> list[Item]:
        if self._items is None:
            with prepare():
                from ddl import config
                from ddl.config.modules import import_module

                imports, _ = config.read(*self._given)
                for statement in imports:
                    import_module(statement)
                self._items = items()
        return self._items

    def lines(self, name: str) -> Iterator[str]:
        """Returns the lines for one name.

        Raises:
          ConfigError: If it is unknown.
        """
        flag = name.lstrip("-").partition("=")[0]
        if kind := next((each for each in (name, f"{name}s") if each in OTHERS), None):
            return getattr(self, f"_{kind}")()
        if found := [(commands, one) for commands, one in _all_flags() if one.name == flag]:
            return self._of_name(found)
        if kind := next((each for each in (name, f"{name}s") if each in KINDS), None):
            return self._of_kind(kind)
        if macro := next((each for each in standard_macros() if each.name == name), None):
            return self._macro(macro)
        return self._item(name)

    def _of_name(self, found: Sequence[tuple[Sequence[str], flags.Flag]]) -> Iterator[str]:
        for commands, one in found:
            yield from text.flag(one, self._columns)
            which = ", ".join(f"ddl {command}" for command in commands)
            yield from wrapped(f"A flag of {which}.", self._columns, "    ", "    ")

    def _of_kind(self, kind: str) -> Iterator[str]:
        found = [item for item in self.items if item.kind == kind]
        if not found:
            yield (
                f"No {kind} are registered. Pass --gin_file=CONFIG to list the items of the "
                "modules that it imports."
            )
        for number, item in enumerate(found):
            if number:
                yield ""
            yield from text.in_short(item, self._columns)

    def _item(self, name: str) -> Iterator[str]:
        short = name.removeprefix("@").removesuffix("()").rpartition("/")[2]
        found = [item for item in self.items if _matches(item, short)]
        if found:
            return self._in_full(found)
        owner, _, parameter = short.rpartition(".")
        owners = [item for item in self.items if _matches(item, owner)]
        lines = [
            text.parameter_in_full(item, one, self._columns)
            for item in owners
            for one in item.parameters
            if one.name == parameter
        ]
        if lines:
            return (line for each in lines for line in each)
        known = [item.name for item in self.items]
        known += [*KINDS, *OTHERS, *(one.name for _, one in _all_flags())]
        known += [each.name for each in standard_macros()]
        hint = did_you_mean(short, known)
        if owners:
            own = [one.name for one in owners[0].parameters]
            hint = did_you_mean(parameter, own) or f" {owner} has {', '.join(own) or 'none'}."
        raise ConfigError(
            f"{name} is no kind, item, parameter, macro or flag.{hint} ddl list shows the kinds; "
            "--gin_file=CONFIG adds the items of the modules that a config imports."
        )

    def _in_full(self, found: Sequence[Item]) -> Iterator[str]:
        for number, item in enumerate(found):
            if number:
                yield ""
            yield from text.in_full(item, self._columns)

    def _macros(self) -> Iterator[str]:
        for macro in standard_macros():
            yield from self._macro(macro)

    def _macro(self, macro: StandardMacro) -> Iterator[str]:
        docs = {
            f"{item.name}.{one.name}": one.doc
            for item in self.items
            if item.origin == "ddl"
            for one in item.parameters
        }
        doc = next((docs[each] for each in macro.sets if docs.get(each)), "")
        return text.macro(macro, doc, self._columns)

    def _flags(self) -> Iterator[str]:
        last = None
        for (command, *_), one in _all_flags():
            if command != last:
                yield ("" if last is None else "\n") + emphasized(f"ddl {command}", "1;4")
            last = command
            yield from text.flag(one, self._columns)

    def _configs(self) -> Iterator[str]:
        for name, description in shipped_configs():
            yield emphasized(name)
            yield from wrapped(description, self._columns, "    ", "    ")

    def _commands(self) -> Iterator[str]:
        width = max(map(len, subcommands.SUBCOMMANDS))
        for name, command in subcommands.SUBCOMMANDS.items():
            yield emphasized(f"{name:{width}}") + f"  {command.purpose}"


def _matches(item: Item, name: str) -> bool:
    """Returns whether a name is that of the item, or the last parts of its full name."""
    return bool(name) and f".{item.selector}".endswith(f".{name}")


def _all_flags() -> list[tuple[list[str], flags.Flag]]:
    """Returns each flag once, with the commands that share it; two flags may have one name."""
    found: dict[int, tuple[list[str], flags.Flag]] = {}
    for command in subcommands.SUBCOMMANDS:
        for flag in flags_of(subcommands.load(command).FLAGS):
            found.setdefault(id(flag), ([], flag))[0].append(command)
    return list(found.values())
