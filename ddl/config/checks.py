"""Checks on a config before anything is built from it."""

import ast
import dataclasses
import inspect
import re
import sys
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ddl.config import registry
from ddl.config.fitting import fits, how_to_fit, in_words
from ddl.config.parsing import hint_of_standard
from ddl.config.signatures import UNKNOWN, Signature, signature_of
from ddl.config.text import is_writable
from ddl.config.values import (
    MACRO_SELECTOR,
    Binding,
    Key,
    Location,
    Macro,
    MacroCycleError,
    Reference,
    enclosing_scopes,
    expand,
    leaves,
    macros_of,
    map_leaves,
    shown,
    values_of,
    with_full_selector,
)
from ddl.errors import ConfigError, closest, did_you_mean, either

# A macro or a reference as a text.
_QUOTED = re.compile(r"%[\w./]+|@[\w./]+(\(\))?")

# Macros that the program sets before it builds; None means not yet set.
_SET_LATER = ("SEED", "STEPS_PER_EPOCH", "TOTAL_STEPS")


def checked(bindings: Sequence[Binding], modules: Sequence[str] = ()) -> dict[Key, Binding]:
    """Checks all bindings and returns the effective ones by key.

    Args:
      bindings: The bindings in the order of the files; a later one overrides an earlier one.
      modules: Names of the modules that the config imports.

    Raises:
      ConfigError: Lists all faults, each with its file and line.
    """
    problems: list[str] = []
    known: list[Binding] = []
    for binding in bindings:
        complaints = list(_unknown_names(binding, modules))
        if complaints:
            problems += map(binding.complain, complaints)
        else:
            known.append(with_full_selector(binding))
    problems += _given_twice(known)
    problems += _undefined_macros(bindings)
    effective = {binding.key: binding for binding in known}
    problems += _lost_to_includes(known, effective)
    if not problems:
        problems += _misfits(effective)
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))
    return effective


def check_macros(bindings: Sequence[Binding]) -> None:
    """Checks the macros, for which no item needs to be registered.

    Raises:
      ConfigError: Lists the macros that are not defined or refer to themselves.
    """
    if problems := list(_undefined_macros(bindings)):
        raise ConfigError("\n".join(dict.fromkeys(problems)))


def _unknown_names(binding: Binding, modules: Sequence[str]) -> Iterator[str]:
    """Yields a complaint for each unknown or ambiguous name."""
    found = registry.matches(binding.selector)
    if len(found) != 1:
        yield _no_single_match(binding.selector, found, modules)
    elif not binding.is_macro:
        yield from _unknown_parameter(binding, found[0])
    for leaf in leaves(binding.value):
        if isinstance(leaf, Reference):
            found = registry.matches(leaf.selector)
            if len(found) != 1:
                yield _no_single_match(leaf.selector, found, modules)
            elif registry.is_broken(found[0]):
                yield (
                    f"{leaf.selector} is a Keras class registered with @gin.configurable, which "
                    "Keras cannot build. Register it with @gin.register."
                )


def _no_single_match(selector: str, found: Sequence[Any], modules: Sequence[str]) -> str:
    if found:
        candidates = sorted(item.selector for item in found)
        return f"{selector} is ambiguous. Write {either(candidates)}."
    name = selector.rpartition(".")[2]
    for module in modules:
        item = getattr(sys.modules.get(module), name, None)
        if callable(item) and getattr(item, "__module__", None) == module:
            return f"{selector} is not registered. Put @gin.register above {name} in {module}."
    hint = did_you_mean(selector, registry.names())
    return f"{selector} is not registered.{hint or ' Import its module in the config.'}"


def _unknown_parameter(binding: Binding, item: Any) -> Iterator[str]:
    signature, parameter = signature_of(item.wrapped), binding.parameter
    explicit = list(signature.annotations)
    if parameter in explicit:
        refused = item.denylist and parameter in item.denylist
        if refused or (item.allowlist and parameter not in item.allowlist):
            yield f"A config may not set {binding.selector}.{parameter}. Remove the binding."
    elif not signature.is_open:
        hint = did_you_mean(parameter, explicit)
        listing = f" It has {', '.join(explicit)}." if explicit else " It has none."
        yield f"{binding.selector} has no parameter {parameter}.{hint or listing}"
    elif parameter not in signature.inherited:
        near = [
            name
            for name in closest(parameter, [*explicit, *signature.inherited], cutoff=0.8)
            # block_1 beside block_2 is not a typo.
            if _without_digits(name) != _without_digits(parameter)
        ]
        if near:
            yield (f"{binding.selector} has no parameter {parameter}. Did you mean {either(near)}?")


def _without_digits(name: str) -> str:
    return "".join(character for character in name if not character.isdigit())


def _given_twice(bindings: Iterable[Binding]) -> Iterator[str]:
    """Yields a complaint for each second value in one file; later files may override."""
    first: dict[tuple[str, Key], Location] = {}
    for binding in bindings:
        here = binding.location
        if here is None or here.file is None:
            continue
        # A file that two others include is read twice and yields the same lines again.
        earlier = first.setdefault((here.file, binding.key), here)
        if earlier != here:
            yield here.complain(
                f"{shown(binding.key)} is already set at {earlier}. Remove one of the two."
            )


def _lost_to_includes(
    bindings: Sequence[Binding], effective: Mapping[Key, Binding]
) -> Iterator[str]:
    """Yields a complaint for each value that a later `include` overrides by accident.

    A later file overrides earlier ones. Two cases are accidents: a file sets a value and then
    includes, below it, a file that overrides the value; or a file is included a second time (such
    as standard.gin by two files) and resets a value set since the first time.
    """
    first_read: dict[tuple[str, int], int] = {}
    for number, binding in enumerate(bindings):
        here, last = binding.location, effective[binding.key].location
        if not here or not last or not here.reading or not last.reading:
            continue  # a --gin_param, which comes last
        place, last_place = (here.reading[-1], here.line), (last.reading[-1], last.line)
        first_read.setdefault(place, number)
        name = shown(binding.key)
        if repr(binding.value) == repr(effective[binding.key].value):
            continue
        if here.reading[-1] in last.reading[:-1]:
            yield here.complain(
                f"{name} is overridden by {last}, which {here.file} includes below this line. Move "
                "the include above this line."
            )
        elif first_read.get(last_place, number) < first_read[place]:
            yield here.complain(
                f"{name} is reset by {last}, which is read a second time after this line. Remove "
                f"the second include of {last.file}."
            )


def _undefined_macros(bindings: Sequence[Binding]) -> Iterator[str]:
    macros = macros_of(values_of(map(with_full_selector, bindings)))
    for binding in bindings:
        for leaf in leaves(binding.value):
            if isinstance(leaf, Macro) and not macros.keys() & set(enclosing_scopes(leaf.name)):
                hint = hint_of_standard(leaf.name, bindings) or did_you_mean(leaf.name, macros)
                hint = hint or f" Add a line {leaf.name} = …."
                yield binding.complain(f"%{leaf.name} is not defined.{hint}")
        try:
            expand(binding.value, macros)
        except MacroCycleError as error:
            yield binding.complain(str(error))


def _misfits(effective: Mapping[Key, Binding]) -> Iterator[str]:
    """Yields a complaint for each value that does not fit its parameter's annotation."""
    macros = known_macros(effective)
    for binding in effective.values():
        if not is_writable(binding.value):
            yield binding.complain(
                f"{binding.value!r} cannot be written to a config and read back. Use another value."
            )
        if binding.is_macro:
            continue
        value = expand(binding.value, macros)
        if binding.selector.startswith(("ddl.", "keras.")) and is_too_large(value):
            yield too_large(binding, value, effective)
            continue
        signature = signature_of(registry.matches(binding.selector)[0].wrapped)
        if _is_optimizer_by_name(binding, value):
            yield _at_the_macro(binding, _NAMED_OPTIMIZER.format(value, _item(value)), effective)
        elif not _accepts(signature, binding.parameter, value):
            yield misfit(binding, value, signature.annotations[binding.parameter], effective)
        elif _is_text_for_number(binding, signature, value):
            yield misfit(binding, value, float, effective)


_NAMED_OPTIMIZER = (
    "Trainer.optimizer must be a call of an optimizer, got {0!r}, which would train at Keras's "
    "default learning rate whatever LEARNING_RATE is. Write Trainer.optimizer = @{1}(), and bind "
    "{1}.learning_rate = %LEARNING_RATE."
)


def _is_optimizer_by_name(binding: Binding, value: Any) -> bool:
    # A script may pass a name to ddl.Trainer, as to Keras's compile.
    parameter = (binding.selector, binding.parameter)
    is_call = isinstance(value, str) and _QUOTED.fullmatch(value)  # has a remedy of its own
    return parameter == ("ddl.Trainer", "optimizer") and isinstance(value, str) and not is_call


def _item(name: str) -> str:
    """Returns the registered item of a similar name, such as `SGD` for `sgd`."""
    names = registry.names()
    same = [one for one in names if one.lower() == name.lower()]
    return [*same, *closest(name, names), "SGD"][0]


def _is_text_for_number(binding: Binding, signature: Signature, value: Any) -> bool:
    """Returns whether a text is bound where Keras, without annotations, takes a number."""
    default = signature.defaults.get(binding.parameter)
    is_unknown = signature.annotations.get(binding.parameter) is UNKNOWN
    is_kerass = binding.selector.startswith("keras.")
    return is_kerass and is_unknown and isinstance(default, float) and isinstance(value, str)


def known_macros(effective: Mapping[Key, Binding]) -> dict[str, Any]:
    """Returns the values of the macros, without those that the program sets later."""
    macros = macros_of(values_of(effective.values()))
    return {k: v for k, v in macros.items() if v is not None or k not in _SET_LATER}


def is_too_large(value: Any) -> bool:
    """Returns whether an integer within a value exceeds TensorFlow's integers."""
    return any(type(leaf) is int and not -(2**63) <= leaf < 2**63 for leaf in leaves(value))


def too_large(binding: Binding, value: Any, effective: Mapping[Key, Binding]) -> str:
    """Returns the complaint about an integer beyond 64 bits."""
    complaint = f"{shown(binding.key)} must fit into 64 bits, got {value!r}."
    return _at_the_macro(binding, f"{complaint} Set a smaller number.", effective)


def _accepts(signature: Signature, parameter: str, value: Any) -> bool:
    if parameter not in signature.annotations:
        return True
    # `x: int = None` is common: a default is valid whatever the annotation says.
    if parameter in signature.defaults and repr(signature.defaults[parameter]) == repr(value):
        return True
    return fits(value, signature.annotations[parameter])


def misfit(binding: Binding, value: Any, annotation: Any, effective: Mapping[Key, Binding]) -> str:
    """Returns the complaint about a value that does not fit its parameter's annotation."""
    complaint = f"{shown(binding.key)} must be {in_words(annotation)}, got {value!r}."
    complaint += _remedy(value, annotation)
    return _at_the_macro(binding, complaint, effective)


def _at_the_macro(binding: Binding, complaint: str, effective: Mapping[Key, Binding]) -> str:
    """Returns a complaint about a value with its place, which may be a macro's line."""
    if isinstance(binding.value, Macro):
        # The fix belongs on the macro's line; the line that uses it is often shipped with ddl.
        for name in enclosing_scopes(binding.value.name):
            macro = effective.get((name, MACRO_SELECTOR, "value"))
            if macro:
                return macro.complain(
                    f"{complaint} The value is that of %{name}, used at {binding.location}. "
                    f"Change {name}."
                )
    return binding.complain(complaint)


def _remedy(value: Any, annotation: Any) -> str:
    """Returns advice if a small change makes the value fit, else an empty string."""
    for evaluate, advice in ((True, "with"), (False, "without")):

        def turned(leaf: Any, evaluate: bool = evaluate) -> Any:
            is_reference = isinstance(leaf, Reference)
            return dataclasses.replace(leaf, evaluate=evaluate) if is_reference else leaf

        other = map_leaves(value, turned)
        if other != value and fits(other, annotation):
            return f" Write {other!r} {advice} parentheses."
    if isinstance(value, Reference) and (remedy := how_to_fit(value, annotation)):
        return remedy
    for leaf in leaves(value):
        if isinstance(leaf, str) and _QUOTED.fullmatch(leaf):
            return f" Write {leaf} without quotation marks."
    if isinstance(value, str):
        hint = did_you_mean(value, _literals(annotation))
        if hint:
            return hint
        try:
            unquoted = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            pass
        else:
            if fits(unquoted, annotation):
                return f" Write {unquoted!r} without quotation marks."
    whole = map_leaves(
        value, lambda leaf: int(leaf) if isinstance(leaf, float) and leaf.is_integer() else leaf
    )
    if fits(whole, annotation):
        return f" Write {whole!r}."
    items = value if isinstance(value, (list, tuple)) else [value]
    for other in (tuple(items), list(items)):
        if fits(other, annotation):
            return f" Write {other!r}."
    return ""


def _literals(annotation: Any) -> Iterator[str]:
    if typing.get_origin(annotation) is typing.Literal:
        yield from (one for one in typing.get_args(annotation) if isinstance(one, str))
    elif not inspect.isclass(annotation):
        for member in typing.get_args(annotation):
            yield from _literals(member)
