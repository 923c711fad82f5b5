import itertools

import pytest

from ddl.errors import ConfigError
from ddl.training.pace import Pace


class FakeClock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def run_loop(pace: Pace, clock: FakeClock, seconds_per_step: float, traced: bool = False) -> int:
    steps = pace.steps_per_loop
    with pace.loop() as timer:
        clock.now += steps * seconds_per_step
        timer.steps = steps
        timer.traced = traced
    return steps


def test_grows_to_the_target_and_stays_there():
    clock = FakeClock()
    pace = Pace(target_seconds=1.0, clock=clock)
    lengths = [run_loop(pace, clock, 0.001) for _ in range(10)]
    assert lengths[0] == 1
    assert all(later <= 4 * earlier for earlier, later in itertools.pairwise(lengths))
    assert 999 <= lengths[-1] <= 1000


def test_slow_steps_make_loops_of_one():
    clock = FakeClock()
    pace = Pace(target_seconds=1.0, clock=clock)
    assert [run_loop(pace, clock, 5.0) for _ in range(4)] == [1, 1, 1, 1]


def test_a_traced_loop_counts_neither_for_the_pace_nor_for_the_speed():
    clock = FakeClock()
    pace = Pace(target_seconds=1.0, clock=clock)
    run_loop(pace, clock, 30.0, traced=True)
    assert pace.take_steps_per_second() is None
    run_loop(pace, clock, 0.1)
    assert pace.steps_per_loop == 4
    assert pace.take_steps_per_second() == pytest.approx(10.0)


def test_time_between_loops_does_not_count():
    clock = FakeClock()
    pace = Pace(steps_per_loop=10, clock=clock)
    for _ in range(3):
        run_loop(pace, clock, 0.1)
        clock.now += 100.0
    assert pace.take_steps_per_second() == pytest.approx(10.0)
    assert pace.take_steps_per_second() is None


def test_a_fixed_number_stays():
    clock = FakeClock()
    pace = Pace(steps_per_loop=7, clock=clock)
    assert [run_loop(pace, clock, 0.001) for _ in range(3)] == [7, 7, 7]


def test_refuses_zero():
    with pytest.raises(ConfigError, match="steps_per_loop must be at least 1, .* got 0"):
        Pace(steps_per_loop=0)
