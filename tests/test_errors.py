"""Which errors are the user's, and the line that they name."""

import importlib
import sys
import textwrap

import keras
import pytest
import tensorflow as tf

from ddl import errors
from ddl.errors import ConfigError


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Imports a text as a module in a folder of its own, or in one below it."""
    imported = []

    def module(text, folder="."):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        monkeypatch.syspath_prepend(str(tmp_path / folder))
        name = f"mine_{len(imported)}"
        (tmp_path / folder / f"{name}.py").write_text(textwrap.dedent(text))
        imported.append(name)
        importlib.invalidate_caches()
        return importlib.import_module(name)

    monkeypatch.chdir(tmp_path)
    yield module
    for name in imported:
        sys.modules.pop(name, None)


def raised(call, *arguments):
    # The traceback begins in this file, which is the user's too, and goes on to the innermost line.
    try:
        call(*arguments)
    except Exception as error:
        return error
    raise AssertionError


def test_the_innermost_line_of_the_users(module):
    mine = module(
        """
        import numpy as np
        def outer(x):
            return inner(x)
        def inner(x):
            return np.zeros(3).reshape(x)
        """
    )
    error = raised(mine.outer, (2, 2))
    place = errors.place_of(error)
    assert str(place) == "mine_0.py:6"
    assert place.text == "return np.zeros(3).reshape(x)"
    message = r"^mine_0\.py:6 raised ValueError: .*\n    return np\.zeros"
    with pytest.raises(ConfigError, match=message), errors.attributing_errors():
        mine.outer((2, 2))


def test_a_syntax_error_names_its_own_file(module):
    error = raised(module, "a = 1\nb = )\n")
    assert str(errors.place_of(error)) == "mine_0.py:2"


def test_autograph_and_keras_leave_the_line_and_their_message_is_short(module):
    mine = module(
        """
        import keras, tensorflow as tf
        def decode(x):
            return tf.no_such_name(x)
        class Model(keras.Model):
            def call(self, x):
                return x.no_such_name
        """
    )
    error = raised(tf.function(lambda x: mine.decode(x)), tf.zeros([1]))
    assert str(errors.place_of(error)) == "mine_0.py:4"
    message = "AttributeError: module 'tensorflow' has no attribute 'no_such_name'"
    assert errors.message_of(error) == message
    error = raised(mine.Model(), keras.ops.zeros([1, 1]))
    assert str(errors.place_of(error)) == "mine_0.py:7"
    assert errors.message_of(error).startswith("AttributeError: ")
    assert "\n" not in errors.message_of(error)


def test_an_error_of_tensorflow_is_whole_without_its_frames():
    text = "Graph execution error:\n\nDetected at node X\n  File a\nOne.\nTwo.\n\t [[{{node X}}]]"
    error = tf.errors.InvalidArgumentError(None, None, text)
    assert errors.message_of(error) == "InvalidArgumentError: One.\nTwo."


@pytest.mark.parametrize(
    ("error", "repeats"),
    [
        (KeyError("a"), True),
        (FileNotFoundError("a"), True),
        (tf.errors.InvalidArgumentError(None, None, "a"), True),
        (OSError(5, "Input/output error"), False),
        (tf.errors.ResourceExhaustedError(None, None, "a"), False),
        (KeyboardInterrupt(), False),
    ],
    ids=repr,
)
def test_failures_of_the_system_may_pass(error, repeats):
    assert errors.repeats(error) is repeats
