"""Runs that several modules compare with."""

import pytest

from tests.run.whole_runs import StraightRuns


@pytest.fixture(scope="session")
def straight(tmp_path_factory):
    """The uninterrupted run of each mode."""
    return StraightRuns(tmp_path_factory.mktemp("straight"))
