"""Names that benchmarks take from ddl; a benchmark that runs for minutes should not miss one."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import benchmarks
import ddl

FILES = sorted(Path(benchmarks.__file__).parent.glob("*.py"))


def used(tree: ast.AST) -> Iterator[str]:
    """Yields the imports from ddl, also within functions, and names such as ddl.data.digits."""
    for node in ast.walk(tree):
        text = ast.unparse(node) if isinstance(node, ast.ImportFrom | ast.Attribute) else ""
        if re.match(r"from ddl\b|ddl(\.\w+)+$", text):
            yield text


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_names_of_ddl_exist(file):
    for text in used(ast.parse(file.read_text())):
        exec(text, {"ddl": ddl})
