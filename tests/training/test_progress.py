"""The progress bar of `Trainer.train`: where it appears, and what a pipe gets."""

import io
import sys
import types

import keras
import numpy as np
import pytest

import ddl
from tests.conftest import make_strategy

DATA = {"image": np.ones([16, 3], "f4"), "label": np.arange(16) % 2}


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(scope="module")
def trainer():
    with make_strategy("one_device", 1).scope():
        task = ddl.Classification(keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)]))
        optimizer = keras.optimizers.SGD(0.1)
        return ddl.Trainer(task, optimizer, DATA, global_batch_size=8, steps_per_loop=2)


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")

    def opened():  # in the test itself: between fixtures and test pytest sets sys.stdout
        stream = Terminal()
        monkeypatch.setattr(sys, "stdout", stream)
        return stream

    return opened


def test_a_terminal_shows_steps_and_figures(trainer, terminal):
    stream = terminal()
    trainer.train(2)
    trainer.train(6, progress=False)
    assert stream.getvalue() == ""  # a single loop, or nobody who wants to see it
    before = trainer.step
    trainer.train(6)
    shown = stream.getvalue()
    assert f"{before + 6}/{before + 6} steps" in shown
    assert "loss" in shown
    assert "\x1b[?25h" in shown  # the cursor is back


@pytest.fixture
def shown(monkeypatch):
    """The outputs of a notebook's cell: the contents of each display, in order."""
    outputs = []

    class Handle:
        def __init__(self, content):
            self.contents = [content]

        def update(self, content, raw):
            assert raw
            self.contents.append(content)

    def display(content, raw, display_id):
        assert raw
        assert display_id
        outputs.append(Handle(content))
        return outputs[-1]

    ipython = types.ModuleType("IPython")
    ipython.get_ipython = lambda: types.SimpleNamespace(kernel=object())
    ipython.display = types.ModuleType("IPython.display")
    ipython.display.display = display
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", ipython.display)
    return outputs


def test_a_notebook_shows_one_output_that_is_replaced(trainer, shown, capsys):
    first = trainer.step
    trainer.train(6)
    (output,) = shown
    assert len(output.contents) == 4
    assert output.contents[0]["text/plain"].startswith(f"{first + 2}/{first + 6} steps")
    assert output.contents[-1]["text/plain"].startswith(f"{first + 6}/{first + 6} steps (100%)")
    assert " · loss " in output.contents[-1]["text/plain"]
    assert capsys.readouterr().out == ""
