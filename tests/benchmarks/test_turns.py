import pytest

from benchmarks.turns import Contender, Failed


@pytest.fixture
def contender():
    cases = ["fails", "works", "breaks", "works", "dies"]
    process = Contender("tests.benchmarks.turn_cases:contender", cases, {"NAME": "value"})
    yield process
    process.close()


def test_a_process_serves_one_case_after_the_other(contender):
    for expected in ("skipped: why", None, "ZeroDivisionError: by zero", None, "its process died"):
        if expected is None:
            assert 0 <= contender.window() < 1
            assert 0 <= contender.window() < 1
        else:
            with pytest.raises(Failed, match=expected):
                contender.window()
        if expected != "its process died":
            contender.next_case()
