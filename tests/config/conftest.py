"""Fixtures that write and load configs."""

import pytest

from ddl import config
from ddl.config import registry
from tests.config import items  # noqa: F401 - registers them


@pytest.fixture(autouse=True)
def _without_own_items(monkeypatch):
    """These tests need no model of ddl's."""
    monkeypatch.setattr(registry, "register", lambda given=None: None)


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes files into the working directory, whose names messages then give."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(text: str, name: str = "run.gin") -> str:
        (tmp_path / name).write_text(text)
        return name

    return write


@pytest.fixture
def load(write):
    def load(text: str = "", *params: str) -> None:
        config.load([write(text)], params)

    return load
