"""The time of an update by phase, from a real profile and from planted ones."""

import pytest
from tensorflow.tsl.profiler.protobuf import xplane_pb2

import ddl
from ddl.run.timing import phase_times
from ddl.step.monitoring.phases import phase_of
from tests.conftest import make_strategy
from tests.run.timing.test_monitor import DATA


@pytest.mark.parametrize(
    ("operation", "phase"),
    [
        ("while/body/_1/while/replica_1/ddl_forward/mlp/dense/MatMul:MatMul", "forward"),
        ("while/ddl_forward_1/MatMul", "forward"),
        (
            "ddl_backward/gradient_tape/while/ddl_forward/mlp/MatMul/MatMul_1",
            "backward",
        ),
        ("while/ddl_backward/AddN", "backward"),
        ("ddl_all_reduce/CollectiveReduceV2", "all_reduce"),
        ("while/ddl_update/sgd/update_0_1/Mul", "update"),
        ("while/my_ddl_update/Mul", None),
        ("while/Less", None),
    ],
)
def test_a_name_tells_the_phase(operation, phase):
    assert phase_of(operation) == phase


@pytest.mark.parametrize(("kind", "replicas"), [("one_device", 1), ("mirrored", 2)])
def test_a_profile_of_a_run_has_all_phases(tmp_path, capsys, kind, replicas):
    """Cheap operations too, such as those of an optimizer on one device."""
    strategy = make_strategy(kind, replicas)
    with strategy.scope():
        model = ddl.models.mlp((4,), 3, hidden_units=(4,))
        trainer = ddl.Trainer(
            ddl.Classification(model),
            ddl.optimizers.FusedSGD(0.1),
            DATA,
            global_batch_size=16,
            strategy=strategy,
        )
    ddl.fit(trainer, tmp_path, train_steps=12, profile=(4, 9))
    found = phase_times.read(tmp_path / "profile/after-step-4" / phase_times.NAME)
    assert (found.first, found.last, found.devices) == (4, 9, "CPUs")
    idle = {phase for phase, time in found.milliseconds.items() if not time > 0}
    assert idle == ({"all_reduce"} if replicas == 1 else set()), found
    output = capsys.readouterr().out
    assert found.line() in output


def plane(space, name, line, events, stats=None):
    """Adds a plane with one line, whose events have a duration in milliseconds."""
    plane = space.planes.add(name=name)
    of_line = plane.lines.add(name=line)
    for number, (operation, milliseconds) in enumerate(events, start=1):
        plane.event_metadata[number].name = stats or operation
        event = of_line.events.add(metadata_id=number, duration_ps=int(milliseconds * 1e9))
        if stats:
            plane.stat_metadata[number].name = operation
            event.stats.add(metadata_id=100, ref_value=number)


def write(folder, space):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "host.xplane.pb").write_bytes(space.SerializeToString())


def test_operations_are_added_up_and_divided_by_the_updates(tmp_path):
    space = xplane_pb2.XSpace()
    events = [
        *[("a/ddl_forward/MatMul:MatMul", 3), ("a/ddl_forward/Relu:Relu", 1)],
        *[("gradient_tape/a/ddl_forward/MatMul/MatMul:MatMul", 6), ("a/Less:Less", 2)],
        # These hold others, or are no operations.
        *[("a/ddl_forward/f:PartitionedCall", 50), ("ExecutorState::Process", 50), ("Loop", 50)],
    ]
    plane(space, "/host:CPU", "tf_Compute/1", events)
    write(tmp_path, space)
    found = phase_times.measured(tmp_path, 10, 12)
    times = {"forward": 2, "backward": 3, "all_reduce": 0, "update": 0, "other": 1}
    assert found.milliseconds == times
    assert phase_times.read(tmp_path / phase_times.NAME) == found
    assert "forward pass 2 ms (33%), backward pass 3 ms (50%)" in found.line()


def test_of_gpus_the_kernels_on_streams_count(tmp_path):
    space = xplane_pb2.XSpace()
    plane(space, "/host:CPU", "tf_Compute/1", [("a/ddl_update/Mul:Mul", 50)])
    kernels = [("a/ddl_update/Mul:Mul", 4), ("", 6)]
    plane(space, "/device:GPU:0", "Stream #13", kernels, stats="kernel")
    plane(space, "/device:GPU:0", "TensorFlow Ops", kernels, stats="kernel")
    write(tmp_path, space)
    found = phase_times.measured(tmp_path, 0, 2)
    assert found.devices == "GPUs"
    assert (found.milliseconds["update"], found.milliseconds["other"]) == (2, 3)


def test_without_operations_or_a_profile_there_is_nothing(tmp_path):
    assert phase_times.measured(tmp_path, 0, 2) is None
    write(tmp_path, xplane_pb2.XSpace())
    assert phase_times.measured(tmp_path, 0, 2) is None


def test_what_is_no_profile_is_named(tmp_path, monkeypatch):
    (tmp_path / "host.xplane.pb").write_bytes(b"\xff\xff\xff")
    with pytest.raises(ValueError, match="is not a profile"):
        phase_times.measured(tmp_path, 0, 2)
    monkeypatch.setattr(phase_times, "LARGEST_PROFILE", 2)
    with pytest.raises(ValueError, match="more than 2 bytes"):
        phase_times.measured(tmp_path, 0, 2)
