"""What `import ddl` offers, without TensorFlow until it is used."""

import ast
import subprocess
import sys
from pathlib import Path

import jedi
import pytest

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


def test_names_are_there_for_completion_and_types():
    """Pylance and jedi read what stands under TYPE_CHECKING; `__getattr__` tells them nothing."""
    tree = ast.parse(Path(ddl.__file__).read_text())
    (checking,) = [node for node in tree.body if isinstance(node, ast.If)]
    imported = {
        name.asname or name.name
        for node in checking.body
        if isinstance(node, ast.ImportFrom)
        for name in node.names
    }
    assert imported == set(dir(ddl)) - {"__version__"}


@pytest.mark.parametrize("of", ["", "data.", "models.", "optimizers.", "layers."])
def test_an_editor_completes_the_names(of):
    """By jedi, without running the code, as in a notebook's Tab and in editors."""
    completed = {each.name for each in jedi.Script(f"import ddl\nddl.{of}").complete()}
    module = getattr(ddl, of.removesuffix(".")) if of else ddl
    public = set(dir(ddl)) if not of else set(module.__all__)
    assert public - {"__version__"} <= completed


def test_an_editor_shows_arguments_and_documentation():
    script = jedi.Script("import ddl\nddl.fit(")
    (signature,) = script.get_signatures()
    assert {"trainer", "train_epochs", "early_stopping"} <= {one.name for one in signature.params}
    assert "Makes a whole run" in signature.docstring()


def test_names_from_before_the_rooms():
    from ddl.distribution import Communication, build_strategy, configure_devices
    from ddl.workers import Workers

    assert Workers is ddl.distribution.workers.Workers
    assert callable(build_strategy)
    assert callable(configure_devices)
    assert Communication().num_packs == 1
