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
import importlib
import ddl.list.__main__
assert importlib.reload(ddl).list is sys.modules["ddl.list"] and "Trainer" in dir(ddl)
assert ddl.config.load and ddl.precision.LossScale and ddl.LossScale is ddl.precision.LossScale
"""


def test_names_are_there_before_tensorflow_is_imported():
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)


def test_no_name_of_the_package_means_another_one_once_a_module_is_imported():
    """Such as `list`, which is the package of a command as soon as that is imported."""
    folder = Path(ddl.__file__).parent
    modules = {path.stem for path in folder.iterdir() if path.suffix in ("", ".py")}
    tree = ast.parse(Path(ddl.__file__).read_text())
    (checking,) = [node for node in tree.body if isinstance(node, ast.If)]
    tree.body.remove(checking)
    named = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert "sorted" in named
    assert "list" in modules
    assert not named & modules


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
