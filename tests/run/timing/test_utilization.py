"""The share of the peak rate: where it is from, and what a run writes."""

import json
from types import SimpleNamespace

import pytest
import tensorflow as tf

import ddl
from ddl.errors import ConfigError
from ddl.run.timing import utilization
from ddl.run.timing.utilization import Peak, Utilization, peak_of_replica
from tests.run.timing.test_monitor import make_trainer


def test_a_run_writes_the_share_of_a_stated_peak(tmp_path, capsys):
    trainer = make_trainer()
    ddl.fit(trainer, tmp_path, train_steps=60, log_every=20, peak_tflops=0.5)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    shown = [row for row in rows if "mfu" in row]
    assert shown
    for row in shown:
        steps_per_second = row["examples_per_second"] / trainer.global_batch_size
        expected = trainer.model_flops * steps_per_second / 0.5e12
        assert row["mfu"] == pytest.approx(expected, rel=1e-6)
    output = capsys.readouterr().out
    assert "the peak of a replica is 5e+11 a second (as stated)" in output
    assert " · mfu " in output


def test_without_a_peak_there_is_no_share(tmp_path, capsys):
    ddl.fit(make_trainer(), tmp_path, train_steps=40, log_every=20)
    assert '"mfu"' not in (tmp_path / "metrics.jsonl").read_text()
    assert "mfu" not in capsys.readouterr().out


def test_a_peak_is_a_number_above_zero():
    with pytest.raises(ConfigError, match="peak_tflops must be a number greater than 0, got 0"):
        ddl.fit(make_trainer(), train_steps=1, peak_tflops=0)


def test_operations_that_cannot_be_counted_are_named():
    strategy = tf.distribute.get_strategy()
    trainer = SimpleNamespace(
        model_flops=None, reason_without_flops="a loop decides", strategy=strategy
    )
    found = Utilization(trainer, Peak(1e12, "as stated"))
    assert "cannot be counted: a loop decides." in found.line
    assert found.figures(10.0) == {}


@pytest.mark.parametrize(
    ("names", "logical", "rate"),
    [
        (["NVIDIA H100 80GB HBM3"], 1, 67e12),
        (["NVIDIA H100 80GB HBM3"] * 2, 2, 67e12),
        (["NVIDIA H100 80GB HBM3"], 2, None),  # virtual GPUs
        (["NVIDIA H100 80GB HBM3 MIG 1g.10gb"], 1, None),
        (["NVIDIA H100 80GB HBM3", "NVIDIA L4"], 2, None),
        (["unknown"], 1, None),
        ([], 0, None),
    ],
)
def test_the_peak_of_a_gpu_is_that_of_the_table(monkeypatch, names, logical, rate):
    experimental = SimpleNamespace(
        get_device_details=lambda gpu: {"device_name": gpu},
        tensor_float_32_execution_enabled=lambda: False,
    )
    config = SimpleNamespace(
        experimental=experimental,
        get_visible_devices=lambda kind: names,
        list_logical_devices=lambda kind: range(logical),
    )
    monkeypatch.setattr(utilization, "tf", SimpleNamespace(config=config))
    found = peak_of_replica(None, None)
    assert (found and found.rate) == rate
    assert found is None or "NVIDIA's data sheet" in found.source
    assert peak_of_replica(None, 2.0) == Peak(2e12, "as stated")
