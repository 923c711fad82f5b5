from ddl.training.actions import EachLoop, Periodic


def visit(action, last, start=0):
    """Runs from `start` to `last`, stopping where the action asks."""
    step = start
    while step < last:
        step = min(last, action.next_step(step) or last)
        action(step)


def test_periodic_calls_at_multiples_and_at_the_end():
    seen = []
    visit(Periodic(30, seen.append, last=100), last=100)
    assert seen == [30, 60, 90, 100]


def test_periodic_acts_at_the_same_steps_when_resumed():
    seen = []
    visit(Periodic(30, seen.append, last=100), last=100, start=47)
    assert seen == [60, 90, 100]


def test_periodic_without_a_period_acts_at_the_end_only():
    seen = []
    visit(Periodic(None, seen.append, last=100), last=100)
    assert seen == [100]


def test_periodic_is_silent_in_between():
    seen = []
    action = Periodic(30, seen.append, last=100)
    for step in (1, 29, 31, 59):
        action(step)
    assert seen == []


def test_each_loop_never_ends_a_loop():
    seen = []
    action = EachLoop(seen.append)
    assert action.next_step(5) is None
    action(6)
    assert seen == [6]
