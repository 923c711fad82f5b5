import re

import pytest

from ddl.diagnosis.phases import described, described_of, during


def test_nested_phases_with_their_durations():
    assert "in no phase" in described()
    with during("the run"), during("the training loop", lambda: " from step 3"):
        lines = described().splitlines()
    assert re.fullmatch(r"Process \d+ is in", lines[0])
    assert re.fullmatch(r"  the run, for \d\.\d s", lines[1])
    assert re.fullmatch(r"    the training loop from step 3, for \d\.\d s", lines[2])
    assert "in no phase" in described()


def test_an_error_keeps_the_phases_that_it_was_raised_in():
    @during("an evaluation")
    def fails():
        raise ValueError

    @during("the run")
    def converts():
        try:
            fails()
        except ValueError as error:
            raise RuntimeError from error

    with pytest.raises(RuntimeError) as caught:
        converts()
    text = described_of(caught.value)
    assert text.index("the run") < text.index("an evaluation")


def test_details_that_fail_are_named():
    with during("the training loop", lambda: str(1 / 0)):
        assert "the training loop (ZeroDivisionError)" in described()
