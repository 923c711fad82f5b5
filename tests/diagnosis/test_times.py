import pytest

from ddl.diagnosis.phases import during, observed_by
from ddl.diagnosis.times import Times


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_each_moment_counts_as_its_innermost_kind():
    clock = Clock()
    times = Times("start_up", clock)

    def passes(seconds):
        clock.now += seconds

    @during("an evaluation", kind="evaluation")
    def fails(seconds):
        with during("a collective", kind="workers"):
            passes(seconds)
            raise KeyError

    with observed_by(times):
        passes(1)
        with during("the run", kind="between"):
            passes(2)
            with during("the training loop", kind="loop"):
                passes(4)
                with during("a detail"):  # of no kind
                    passes(8)
            with during("a callback", kind="callbacks"):
                passes(16)
                with during("an evaluation", kind="evaluation"):
                    passes(32)
                with during("a collective", kind="workers"):
                    passes(64)
            with pytest.raises(KeyError):
                fails(128)
            passes(256)
        assert times.seconds() == {
            **{"start_up": 1, "between": 258, "loop": 12, "callbacks": 48},
            **{"workers": 192, "evaluation": 0},
        }
    with during("the training loop", kind="loop"):
        passes(512)
    assert sum(times.seconds().values()) == clock.now - Clock.now
