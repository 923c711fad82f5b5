"""The benchmark on GPUs, tried on a CPU, and what it computes its figures from."""

import sys

import pytest
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from benchmarks import __main__ as runner
from benchmarks import command, device_trace, gpu, gpu_counts
from benchmarks.gpu_cases import CASES


def run_of(milliseconds):
    kinds = {"idle": 0.5, "kernels": 40.0, "memory": 100.0, "first": 3.0}
    times = zip(gpu.NAMES, milliseconds, strict=True)
    return {"device": "NVIDIA H100 80GB HBM3"} | {name: {"ms": t} | kinds for name, t in times}


def test_ratios_are_of_the_same_process():
    case = CASES[2]
    runs = [run_of([2.0, 4.0, 6.0, 1.0]), run_of([4.0, 4.0, 4.0, 4.0])]
    report = gpu.reported({case: runs})
    _, rate, of_fit, of_orbit, of_bare = report.tables[0].rows[0]
    assert (rate.low, rate.high) == (16e3, 32e3)
    assert (of_fit.low, of_fit.high) == (1, 2)
    assert (of_orbit.low, of_orbit.high) == (1, 3)
    assert (of_bare.low, of_bare.high) == (1, 2)
    assert [bar.limit for bar in report.bars] == [1.05, 1.0]


def test_a_contender_that_failed_is_named():
    runs = [run_of([2.0, 4.0, 6.0, 1.0]) | {gpu.ORBIT: "skipped"}]
    report = gpu.reported({CASES[0]: runs})
    assert report.tables[0].rows[0][3] == "–"
    assert f"Orbit, {CASES[0]}: skipped" in report.notes


@pytest.mark.skipif(command.machine()["gpus"] != "none", reason="there is a GPU")
def test_it_says_that_it_needs_a_gpu(monkeypatch):
    with pytest.raises(SystemExit, match="needs an NVIDIA GPU, and this machine has none"):
        next(gpu.measure(True))
    monkeypatch.setattr(sys, "argv", ["benchmarks", "gpu"])
    with pytest.raises(SystemExit, match="The benchmark gpu needs an NVIDIA GPU"):
        runner.main()


def test_operations_of_an_update_are_counted_without_a_gpu():
    report = [*gpu_counts.measure(True)][-1]
    (table,) = report.tables
    mlp, float16 = table.rows
    name, operations, kernels, calls, added, step, _, loop, ratio, *_ = mlp
    assert (name, operations, added) == ("MLP", pytest.approx(40, rel=0.1), 0)
    assert (calls, kernels) == (5, operations - 5)  # matrix products
    assert report.bars[1].value == kernels <= report.bars[1].limit == 50
    assert 20 < step < loop < operations
    assert ratio == round(operations / loop, 2) == report.bars[0].value <= gpu_counts.WORSE
    name, _, _, _, added, _, _, _, _, crossing, on_host = float16
    assert name == "MLP: mixed_float16"
    assert 15 < added < 40
    assert (crossing, on_host) == (1, 0)  # whether the gradients are finite


def profile():
    """A GPU with two streams: kernels at 0 to 2, 1 to 3 and 5 to 6 us, a copy at 9 to 10."""
    space = xplane_pb2.XSpace()
    space.planes.add(name="/host:CPU").lines.add(name="Stream of words").events.add()
    plane = space.planes.add(name="/device:GPU:0")
    for number, name in enumerate(["gemm", "MemcpyH2D", "summary"]):
        plane.event_metadata[number].name = name
    plane.stat_metadata[7].name = "memcpy_details"
    plane.stat_metadata[8].name = "kind_src:pinned kind_dst:device size:513 dest:0 async:1"
    events = {
        "Stream #13": [(0, 0, 2), (0, 5, 1)],
        "Stream #14": [(0, 1, 2), (1, 9, 1)],
        "XLA Modules": [(2, 0, 10)],
    }
    for name, of_line in events.items():
        line = plane.lines.add(name=name, timestamp_ns=10_000)
        for kind, start, length in of_line:
            event = line.events.add(
                metadata_id=kind, offset_ps=start * 10**6, duration_ps=length * 10**6
            )
            if kind == 1:
                event.stats.add(metadata_id=7, ref_value=8)
    return space.SerializeToString()


def test_idle_time_and_copies_of_a_profile():
    trace = device_trace.read([profile()])
    assert trace.span == pytest.approx(10e-6)
    assert trace.busy == pytest.approx(5e-6)
    assert trace.idle == pytest.approx(5e-6)
    assert (trace.kernels, trace.copies("H2D"), trace.copies("D2H")) == (3, 1, 0)
    assert trace.copied("H2D") == 513
