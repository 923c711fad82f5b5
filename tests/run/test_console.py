import io

from rich.console import Console

from ddl.run.console import RunConsole, format_figures


def plain() -> tuple[RunConsole, io.StringIO]:
    text = io.StringIO()
    return RunConsole(Console(file=text, soft_wrap=True, highlight=False)), text


def test_a_line_for_each_log_where_there_is_no_terminal():
    console, text = plain()
    console.start(0, 100)
    console.advance(50, {"loss": 1.0})
    console.write(50, 0.5, "train", {"accuracy": 0.5, "loss": 1.0, "examples_per_second": 1234.5})
    console.close()
    assert text.getvalue() == (
        "step 50 · epoch 0.50 · train · loss 1 · accuracy 0.5000 · 1,234 examples/s\n"
    )


def test_a_bar_on_a_terminal():
    text = io.StringIO()
    console = RunConsole(Console(file=text, force_terminal=True, width=100))
    console.start(0, 100)
    console.advance(50, {"loss": 0.25})
    console.write(50, 0.5, "train", {"loss": 0.25})
    console.write(50, 0.5, "eval", {"loss": 0.125})
    console.close()
    assert "50/100" in text.getvalue()
    assert "loss 0.25" in text.getvalue()
    assert "· train ·" not in text.getvalue()
    assert "eval · loss 0.125" in text.getvalue()


def test_summary():
    console, text = plain()
    console.summary("ddl", {"devices": "[CPU:0]", "replicas": "1"})
    assert text.getvalue() == "devices: [CPU:0]\nreplicas: 1\n"


def test_figures():
    figures = {"learning_rate": 1e-5, "loss_scale": 32768.0, "loss": 0.03125}
    assert format_figures(figures) == "loss 0.03125 · learning rate 1e-05 · loss scale 32,768"
