"""What `import ddl` offers, without TensorFlow until it is used."""

import ast
import subprocess
import sys
from pathlib import Path

import ddl

PROGRAM = """
import sys
import ddl
assert ddl.errors.ConfigError and set(ddl.__all__) <= set(dir(ddl))
assert {"data", "layers", "models", "errors"} <= set(dir(ddl))
import ddl.distribution
assert "build_strategy" in dir(ddl.distribution)
assert "tensorflow" not in sys.modules
"""


def test_names_are_there_before_tensorflow_is_imported():
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)


def test_every_name_can_be_had():
    for name in dir(ddl):
        assert getattr(ddl, name) is not None
    assert ddl.LossScale is ddl.precision.LossScale


def test_names_are_there_for_completion_and_types():
    """Editors read what stands under TYPE_CHECKING; `__getattr__` tells them nothing."""
    tree = ast.parse(Path(ddl.__file__).read_text())
    (checking,) = [node for node in tree.body if isinstance(node, ast.If)]
    imported = {
        name.asname or name.name
        for node in checking.body
        if isinstance(node, ast.ImportFrom)
        for name in node.names
    }
    assert imported == set(dir(ddl)) - {"__version__"}
