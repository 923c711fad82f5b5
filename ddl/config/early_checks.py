"""Types and ranges of ddl's own parameters, checked before TensorFlow is imported.

The annotations are read from ddl's source files, and the ranges are those of `ddl.choices`, so each
rule stands in one place.
"""

import ast
import collections.abc
import dataclasses
import functools
import pathlib
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from ddl.choices import check_above_0, check_at_least_1, check_seed, check_train_steps
from ddl.config import mentions, registry
from ddl.config.checks import is_too_large, known_macros, misfit, too_large
from ddl.config.fitting import fits
from ddl.config.parsing import PACKAGE_FOLDER
from ddl.config.signatures import UNKNOWN
from ddl.config.usage import is_shipped
from ddl.config.values import Binding, Key, Macro, Reference, expand, leaves
from ddl.errors import ConfigError

_PERIODS = ("train_epochs", "eval_every", "checkpoint_every", "log_every")

_RANGES: Mapping[str, Callable[[Any], None]] = {
    "RunPlan.train_steps": check_train_steps,
    **{f"RunPlan.{name}": partial(check_above_0, f"RunPlan.{name}") for name in _PERIODS},
    "set_numerics.seed": check_seed,
    "global_batch_size.total": partial(check_at_least_1, "GLOBAL_BATCH_SIZE"),
    "global_batch_size.per_replica": partial(check_at_least_1, "PER_REPLICA_BATCH_SIZE"),
}


def check_values(bindings: Sequence[Binding], names_are_of_libraries: bool) -> None:
    """Checks the values of parameters of ddl, for which no item needs to be registered.

    Args:
      bindings: All bindings in the order of the files.
      names_are_of_libraries: Whether each name in the config is that of an item of ddl or Keras.
        Otherwise only the parameters that files shipped with ddl bind are checked, since a module
        of the user may have an item of the same name.

    Raises:
      ConfigError: Lists the values of the wrong type; if there is none, the first value out of its
        range.
    """
    effective = {binding.key: binding for binding in map(_without_package, bindings)}
    macros = known_macros(effective)
    values = {
        key: expand(binding.value, macros)
        for key, binding in effective.items()
        if not binding.is_macro and (names_are_of_libraries or is_shipped(binding))
    }
    values = {key: value for key, value in values.items() if not any(map(_is_open, leaves(value)))}
    if problems := list(_misfits(effective, values)):
        raise ConfigError("\n".join(dict.fromkeys(problems)))
    for key, value in values.items():
        check = _RANGES.get(f"{key[1]}.{key[2]}")
        if check is not None:
            try:
                check(value)
            except ConfigError as error:
                places = mentions.places(str(error), effective)
                raise ConfigError("\n".join([str(error), *places])) from None


def _without_package(binding: Binding) -> Binding:
    """Returns the binding with `RunPlan` for `ddl.RunPlan`."""
    return dataclasses.replace(binding, selector=binding.selector.removeprefix("ddl."))


def _is_open(leaf: Any) -> bool:
    return isinstance(leaf, (Macro, Reference))


def _misfits(effective: Mapping[Key, Binding], values: Mapping[Key, Any]) -> Iterator[str]:
    for key, value in values.items():
        if is_too_large(value):
            yield too_large(effective[key], value, effective)
            continue
        annotation = annotation_of(key[1], key[2])
        if not fits(value, annotation):
            yield misfit(effective[key], value, annotation, effective)


def annotation_of(name: str, parameter: str) -> Any:
    """Returns the type of a parameter of one of ddl's own items, read from its source file.

    Args:
      name: The item, such as `RunPlan`.
      parameter: Its parameter.

    Returns:
      The type; `UNKNOWN` if it is not made of Python's types and literals alone.
    """
    for path in registry.OWN:
        module, _, attribute = path.partition(":")
        if attribute == name:
            found = _annotations(_definition(module, name)).get(parameter)
            return UNKNOWN if found is None else _evaluate(found, module)
    return UNKNOWN


def _definition(module: str, name: str) -> ast.stmt | None:
    """Returns the statement of a module that defines a class or function, if it has one."""
    for statement in reversed(_tree(module).body):  # overloads stand before the definition
        if isinstance(statement, (ast.ClassDef, ast.FunctionDef)) and statement.name == name:
            return statement
    return None


@functools.cache
def _tree(module: str) -> ast.Module:
    path = pathlib.Path(PACKAGE_FOLDER, *module.split(".")[1:])
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8"))


def _annotations(definition: ast.stmt | None) -> dict[str, ast.expr]:
    """Returns the annotations of a function, of a constructor, or of a dataclass's fields."""
    if isinstance(definition, ast.ClassDef):
        for member in definition.body:
            if isinstance(member, ast.FunctionDef) and member.name == "__init__":
                return _annotations(member)
        fields = [one for one in definition.body if isinstance(one, ast.AnnAssign)]
        return {one.target.id: one.annotation for one in fields if isinstance(one.target, ast.Name)}
    if isinstance(definition, ast.FunctionDef):
        arguments = definition.args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        return {one.arg: one.annotation for one in every if one.annotation is not None}
    return {}


def _evaluate(annotation: ast.expr, module: str) -> Any:
    code = compile(ast.fix_missing_locations(ast.Expression(annotation)), module, "eval")
    try:
        return eval(code, {}, _Names(module))
    except (NameError, AttributeError, TypeError):  # a class of ddl, Keras or TensorFlow
        return UNKNOWN


class _Names(dict[str, Any]):
    """The names of a module that stand for types of Python or for choices of such."""

    def __init__(self, module: str):
        super().__init__(Any=Any, Literal=typing.Literal)
        self.update({name: getattr(collections.abc, name) for name in ("Mapping", "Sequence")})
        self._module = module

    def __missing__(self, name: str) -> Any:
        for statement in _tree(self._module).body:
            if isinstance(statement, ast.ImportFrom) and (statement.module or "")[:4] == "ddl.":
                if name in [one.name for one in statement.names]:
                    return _evaluate(ast.Name(name, ast.Load()), str(statement.module))
            elif isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
                target = (
                    statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
                )
                if isinstance(target, ast.Name) and target.id == name:
                    return _evaluate(statement.value, self._module)
        raise KeyError(name)
