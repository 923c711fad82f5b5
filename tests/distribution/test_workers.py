"""Several real workers on this machine, as `ddl.launch` starts them."""

import re
import signal

import pytest

from tests.distribution.whole_clusters import (
    arguments,
    finish,
    finish_all,
    free_addresses,
    launch,
    start_worker,
)


@pytest.mark.processes
def test_workers_agree_on_the_step_at_which_they_stop(tmp_path):
    """One of them is asked; all save and end at the same step, with 75."""
    model_dir, asked = tmp_path / "run", tmp_path / "asked"
    asked.touch()
    seldom = ["TRAIN_STEPS = 100000", "EVAL_EVERY = 100000", "CHECKPOINT_EVERY = 100000"]
    stops = ["import tests.contract.noisy_task", "RunPlan.callbacks = [@Every()]"]
    stops += ["Every.steps = 20", "Every.function = @DieOnce()"]
    stops += [f"DieOnce.file = '{asked}'", f"DieOnce.number = {signal.SIGTERM.value}"]
    status, output = finish(launch(2, "--mode=train", *arguments(model_dir, *stops, *seldom)))
    assert status == 75, output
    saved = max(int(path.stem.removeprefix("step-")) for path in model_dir.rglob("step-*.index"))
    step = f"at step {saved:,} of 100,000, after saving"
    assert step in output
    assert re.search(rf"^\[worker 1\] .*Training stopped on SIGTERM {step}", output, re.M)


@pytest.mark.processes
def test_workers_that_differ_are_refused_with_the_differences(tmp_path):
    model_dir = tmp_path / "run"
    hosts = free_addresses(2)
    other = "import ddl; ddl.__version__ = '9'; import ddl.main; ddl.main.run()"
    given = arguments(model_dir)
    workers = [
        start_worker(0, hosts, *given),
        start_worker(
            *(1, hosts, *given, "--gin_param=LEARNING_RATE = 0.5", "--gin_param=SEED = 3"),
            program=("-c", other),
        ),
    ]
    for status, output in finish_all(workers):
        assert status == 1, output
        assert "Worker 1 must have the code, versions, config and flags of worker 0, got" in output
        for told in ("ddl 9", "LEARNING_RATE = 0.5", "SEED = 3"):
            assert f"  worker 1: {told}" in output
        for told in ("ddl 0.1.0", "LEARNING_RATE = ", "SEED = "):
            assert f"  worker 0: {told}" in output
    assert not list(model_dir.glob("*"))
