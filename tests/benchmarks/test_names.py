"""Names that benchmarks take from ddl; a benchmark that runs for minutes should not miss one."""

import ast
import importlib
from pathlib import Path

import pytest

import benchmarks

FILES = sorted(Path(benchmarks.__file__).parent.glob("*.py"))


def used(tree: ast.AST) -> set[str]:
    """Returns the dotted names that a module takes from ddl, such as ddl.data.digits."""
    places = {"ddl": "ddl"}
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "ddl":
            for name in node.names:
                places[name.asname or name.name] = f"{node.module}.{name.name}"
                names.add(f"{node.module}.{name.name}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute):
            whole = ast.unparse(node)
            first, _, rest = whole.partition(".")
            if first in places and whole.replace(".", "").isidentifier():
                names.add(f"{places[first]}.{rest}")
    return names


def exists(name: str) -> bool:
    parts = name.split(".")
    found = importlib.import_module(parts[0])
    for place, part in enumerate(parts[1:], start=2):
        if not hasattr(found, part):
            try:
                found = importlib.import_module(".".join(parts[:place]))
            except ImportError:
                return False
        else:
            found = getattr(found, part)
    return True


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_names_of_ddl_exist(file):
    missing = [name for name in sorted(used(ast.parse(file.read_text()))) if not exists(name)]
    assert not missing
