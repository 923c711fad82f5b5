"""The API pages hold the docstrings of today."""

import importlib.util

from tests.documents.pages import ROOT


def test_the_api_pages_are_those_of_the_docstrings():
    spec = importlib.util.spec_from_file_location("write", ROOT / "docs/api/write.py")
    write = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(write)
    shown = {path.name: path.read_text() for path in write.FOLDER.glob("*.md")}
    pages = write.pages()
    stale = [name for name in {*shown, *pages} if shown.get(name) != pages.get(name)]
    assert not stale, f"Run `make api`: {sorted(stale)} differ from the docstrings."
