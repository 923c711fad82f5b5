from ddl.optimizers.schedules import epochs_to_steps, steps_after_warmup, warmup_steps


def test_epochs():
    assert epochs_to_steps(3, 10) == 30
    assert epochs_to_steps(1.1, 110) == 121  # 1.1 * 110 > 121
    assert epochs_to_steps(0.25, 10) == 3
    assert epochs_to_steps([0, 1e-9], 10) == [0, 1]  # any part of an epoch is an update
    assert epochs_to_steps([30, 60, 0.5], 157) == [4710, 9420, 79]


def test_warm_up_in_either_unit():
    assert warmup_steps() == 0
    assert warmup_steps(steps=5) == 5
    assert warmup_steps(epochs=2.5, steps_per_epoch=10) == 25
    assert steps_after_warmup(100, 25) == 75
