import io
import sys
import types

import pytest
from rich.console import Console

from ddl.run import loop
from ddl.run.writers import RunConsole


def plain() -> tuple[RunConsole, io.StringIO]:
    text = io.StringIO()
    return RunConsole(Console(file=text, soft_wrap=True, highlight=False)), text


def test_a_line_for_each_log_where_there_is_no_terminal():
    console, text = plain()
    console.start(0, 100)
    console.advance(50, lambda: {"loss": 1.0})
    console.write(50, 0.5, "train", {"far_off": 0.5, "loss": 1.0, "examples_per_second": 1234.5})
    console.write(60, 0.0, "eval", {"accuracy": 0.5})  # data without an end have no epochs
    console.close()
    assert text.getvalue() == (
        "step 50 · epoch 0.50 · train · loss 1 · far_off 0.5 · 1,234 examples/s\n"
        "step 60 · eval · accuracy 0.5000\n"
    )


def test_a_bar_on_a_terminal():
    text = io.StringIO()
    console = RunConsole(Console(file=text, force_terminal=True, width=100))
    console.start(0, 100)
    console.advance(50, lambda: {"loss": 0.25})
    console.write(50, 0.5, "train", {"loss": 0.375})
    console.write(50, 0.5, "eval", {"loss": 0.125})
    console.close()
    assert "50/100" in text.getvalue()
    assert "loss 0.25" in text.getvalue()
    assert "train · loss 0.375" in text.getvalue()  # stays above the bar
    assert "eval · loss 0.125" in text.getvalue()


HOSTILE = "[/bold]:smile:\x1b[2J\x9b\u202e"


@pytest.mark.parametrize("terminal", [False, True])
def test_names_are_neither_markup_nor_control_sequences(terminal):
    text = io.StringIO()
    console = RunConsole(Console(file=text, force_terminal=terminal, width=200))
    console.line(HOSTILE)
    console.start(0, 100)
    console.advance(50, lambda: {HOSTILE: 1.0})
    console.write(50, 0.5, "eval", {HOSTILE: 1.0})
    console.close()
    assert text.getvalue().count(r"[/bold]:smile:\x1b[2J\x9b\u202e") >= (3 if terminal else 2)
    for control in ("\x1b[2J", "\x9b", "\u202e"):
        assert control not in text.getvalue()


def test_busy_gpus(monkeypatch):
    """A part of the second GPU has no rates."""

    def rates(handle):
        return types.SimpleNamespace(gpu={"of index 3": 25}[handle])

    library = types.SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda index: f"of index {index}",
        nvmlDeviceGetHandleByUUID=lambda name: name,
        nvmlDeviceGetUtilizationRates=rates,
    )
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-b")
    devices = [types.SimpleNamespace(name=f"/physical_device:GPU:{n}") for n in (0, 1)]
    monkeypatch.setattr(loop.tf.config, "get_visible_devices", lambda kind: devices)
    assert loop.gpu_utilization() == {"gpu_utilization/0": 0.25}
