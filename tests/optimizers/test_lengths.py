from ddl.optimizers.schedules import epochs_to_steps


def test_epochs():
    assert epochs_to_steps(3, 10) == 30
    assert epochs_to_steps(1.1, 110) == 121  # 1.1 * 110 > 121
    assert epochs_to_steps(0.25, 10) == 3
    assert epochs_to_steps([0, 1e-9], 10) == [0, 1]  # any part of an epoch is an update
    assert epochs_to_steps([30, 60, 0.5], 157) == [4710, 9420, 79]
