"""The check finds planted mistakes and no others."""

import pytest

from ddl.checking import check, worker
from ddl.checking.configurations import ALL, ONE, RESUMED, WRITER, Configuration
from ddl.checking.recording import Recording
from ddl.checking.report import report_on
from tests.checking import planted, right
from tests.conftest import make_strategy


def in_this_process(module, name, configurations, folder):
    """Returns the report of a check whose runs are made in this process, one after the other.

    The first one that differs is the last one.
    """
    job = {"factory": f"{module.__name__}:{name}", "folder": str(folder)}
    recordings = {}
    for configuration in (ONE, *configurations):
        strategy = make_strategy(*STRATEGIES[configuration.replicas])
        recordings[configuration] = Recording()
        worker.run(job, configuration, strategy, recordings[configuration])
        report = report_on(recordings)
        if recordings[ONE].failure is not None or not report.same:
            break
    return report


STRATEGIES = {1: ("one_device", 1), 2: ("mirrored", 2)}
# Configurations of the planted mistakes that two replicas do not show.
SHOWN_BY = {
    "noise_of_a_generator_in_python": [WRITER, RESUMED],
}
RESUMED_TOO = {"gan"}


@pytest.mark.usefixtures("rows_checked_on_one_device")
@pytest.mark.parametrize("name", planted.EXPECTED)
def test_a_planted_mistake_is_found(name, tmp_path):
    report = in_this_process(planted, name, SHOWN_BY.get(name, [WRITER]), tmp_path)
    assert not report.same
    stage, causes = planted.EXPECTED[name]
    first = report.differences[0]
    assert first.stage == stage, report
    assert first.cause.name in causes, report


@pytest.mark.usefixtures("rows_checked_on_one_device")
@pytest.mark.parametrize("name", ["gan", "masks_and_sparse_embeddings"])
def test_a_right_step_gives_no_alarm(name, tmp_path):
    """On two replicas, or with two microbatches each; after a resume."""
    more = [WRITER, RESUMED] if name in RESUMED_TOO else [Configuration(2, 2)]
    report = in_this_process(right, name, more, tmp_path)
    assert report.same, report
    assert {*more} <= {*report.checked}, report
    assert report.values > 30
    assert report.largest < 1e-10


@pytest.mark.processes
@pytest.mark.usefixtures("forked_checks")
def test_all_configurations_in_processes():
    """All draw anew but the resumed run, which computes the bits of its writer."""
    report = check(f"{planted.__name__}:dropout_of_keras")
    assert {one.configuration for one in report.differences} == {*ALL} - {ONE, RESUMED}
    assert {one.cause.name for one in report.differences} == {"draw by replica"}
