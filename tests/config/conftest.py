"""Fixtures that write and load configs."""

import pytest

from ddl import config
from ddl.config import registry
from tests.config import dummies  # noqa: F401 - registers them


@pytest.fixture(scope="module", autouse=True)
def _without_own_items():
    """These tests are about configs, not about what ddl offers to be configured."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "OWN", ())
        registry.register_all.cache_clear()
        yield
    registry.register_all.cache_clear()


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes files into the working directory, whose names messages then give."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(text: str, name: str = "run.gin") -> str:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        return name

    return write


@pytest.fixture
def load(write):
    def load(text: str = "", *params: str) -> None:
        config.load([write(text)], params)

    return load
