"""The small files of all readers."""

import pytest

from tests.data import files


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A folder that has them."""
    folder = tmp_path_factory.mktemp("readers")
    files.write(folder)
    return folder
