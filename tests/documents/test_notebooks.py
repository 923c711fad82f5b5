"""The notebooks, the programs of their page, and the three scripts of the page on Keras."""

import json
import os
import re
import sys

import nbformat
import pytest
from nbclient import NotebookClient

from tests.documents.pages import ROOT, blocks, files
from tests.processes import forked

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
SCRIPTS = ("images.py", "text.py", "table.py")


def run(arguments, folder):
    result = forked.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "MPLBACKEND": "agg"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def test_notebooks_hold_no_outputs():
    assert [path.stem for path in NOTEBOOKS] == ["digits", "own_step"]
    for path in NOTEBOOKS:
        cells = json.loads(path.read_text())["cells"]
        assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)


def executed(path, folder, monkeypatch) -> list[dict]:
    """Returns the outputs of a notebook's cells, run by a kernel as Jupyter does."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=600, resources=resources).execute()
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks(path, tmp_path, monkeypatch):
    """Each shows the bar of its training as one output, and no control codes."""
    outputs = executed(path, tmp_path, monkeypatch)
    texts = [output.get("text") or output["data"]["text/plain"] for output in outputs]
    accuracy = {"digits": r"accuracy ([\d.]+)", "own_step": r"0\.05: ([\d.]+)"}[path.stem]
    assert float(re.search(accuracy, texts[-1])[1]) > 0.9
    assert not any("\x1b" in text for text in texts)
    bars = [
        output for output in outputs if "<progress" in output.get("data", {}).get("text/html", "")
    ]
    assert len(bars) == {"digits": 1, "own_step": 2}[path.stem]
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(pictures) == (path.stem == "digits")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["virtual_devices.py", "questions.py"])
def test_programs_of_the_page(name, tmp_path):
    text = files()[name]
    if name == "questions.py":  # its model begins at random
        text = f"import keras\nkeras.utils.set_random_seed(0)\n{text}"
        text += "\nassert abs(trainer.history[-2]['learning_rate'] - 0.01) < 1e-6\n"
    (tmp_path / name).write_text(text)
    printed = run([name], tmp_path).split()
    if name == "virtual_devices.py":
        assert printed[-1] == "2"
    else:
        assert printed[-1] == pytest.approx(printed[-2])
        assert float(printed[-1]) > 0.85


def of_keras() -> dict[str, str]:
    """The scripts with Keras's `fit`, by the names of ddl's."""
    page = ROOT / "docs" / "keras-scripts.md"
    found = [block.text for block in blocks(page) if "BackupAndRestore" in block.text]
    return dict(zip(SCRIPTS, found, strict=True))


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_are_hardly_longer_than_keras_ones(name):
    def lines(text):
        return len([x for x in text.splitlines() if x.strip() and not x.startswith("#")])

    assert lines(files()[name]) <= 1.2 * lines(of_keras()[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_reach_what_keras_reaches(name, tmp_path):
    figure, better = ("mae", "most") if name == "table.py" else ("accuracy", "least")
    reached = {}
    for which, number, text in (
        ("keras", 1, of_keras()[name]),
        ("one", 1, files()[name]),
        ("two", 2, files()[name]),
    ):
        folder = tmp_path / which
        folder.mkdir()
        (folder / name).write_text(text)
        printed = run(["-m", "tests.documents.on_devices", str(number), name], folder).splitlines()
        if which != "keras":
            assert printed.pop() == f"replicas {number}"
            (run_folder,) = (folder / "runs").iterdir()
            assert {"checkpoints", "eval", "metrics.jsonl", "train"} <= set(os.listdir(run_folder))
        reached[which] = float(re.search(rf"'{figure}': ([\d.]+)", printed[-1])[1])
    for which in ("one", "two"):
        if better == "least":
            assert reached[which] > reached["keras"] - 0.03, reached
        else:
            assert reached[which] < reached["keras"] * 1.15, reached
