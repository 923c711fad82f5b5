"""The notebooks, and the scripts of the page on Keras."""

import json
import os
import re

import nbformat
import pytest
from nbclient import NotebookClient

from tests.documents.pages import ROOT, blocks, files

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
SCRIPTS = ("images.py", "text.py", "table.py")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_compile_and_hold_no_outputs(path):
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert cells
    for cell in cells:
        assert not cell["outputs"]
        assert cell["execution_count"] is None
        compile("".join(cell["source"]), path.name, "exec")


@pytest.mark.processes
def test_a_notebook(tmp_path, monkeypatch):
    """A kernel runs it as Jupyter does; a training shows a bar without control codes."""
    (path,) = (path for path in NOTEBOOKS if path.stem == "own_step")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        cell.source = cell.source.replace("(0.0, 0.05)", "(0.05,)").replace("epochs=10", "epochs=2")
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=600, resources=resources).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    texts = [output.get("text") or output["data"]["text/plain"] for output in outputs]
    assert float(re.search(r"0\.05: ([\d.]+)", texts[-1])[1]) > 0.5
    assert not any("\x1b" in text for text in texts)
    htmls = [output.get("data", {}).get("text/html", "") for output in outputs]
    assert sum("<progress" in html for html in htmls) == 1


def of_keras() -> dict[str, str]:
    """The scripts with Keras's `fit`, by the names of ddl's."""
    page = ROOT / "docs" / "keras-scripts.md"
    found = [block.text for block in blocks(page) if "BackupAndRestore" in block.text]
    return dict(zip(SCRIPTS, found, strict=True))


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_are_hardly_longer_than_keras_ones(name):
    def lines(text):
        return len([x for x in text.splitlines() if x.strip() and not x.startswith("#")])

    compile(of_keras()[name], name, "exec")
    assert lines(files()[name]) <= 1.2 * lines(of_keras()[name])
