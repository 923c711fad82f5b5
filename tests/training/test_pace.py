import itertools

from ddl.training.pace import Pace


def test_loops_grow_to_the_target_and_stay_there():
    pace, lengths = Pace(), []
    for _ in range(10):
        lengths.append(pace.steps_per_loop)
        pace.add(lengths[-1], lengths[-1] * 0.001)
    assert lengths[0] == 1
    assert all(later <= 4 * earlier for earlier, later in itertools.pairwise(lengths))
    assert 999 <= lengths[-1] <= 1000
    pace.add(lengths[-1], 5.0 * lengths[-1])  # slow steps make loops of one
    assert pace.steps_per_loop == 1


def test_figures_are_those_since_the_last_log():
    pace = Pace()
    pace.add(1, 30.0, traced=True)  # counts neither for the speed nor for the pace
    assert (pace.take(), pace.steps_per_loop) == ((None, {}), 1)
    pace.add(1, 4.0, 1.0)
    assert pace.take() == (0.25, {"input_share": 0.25})
    pace.add(1, 2.0, 1.5)
    assert pace.take() == (0.5, {"input_share": 0.75})
    pace.add(1, 2.0, None)  # unknown
    assert pace.take() == (0.5, {})
    assert pace.total_seconds == 38.0
