"""Directories that can be replayed, and errors for all others. Without TensorFlow."""

import fcntl
import json
import os
import sys

import pytest

from ddl.cli.commands import _text_of
from ddl.errors import ConfigError, ModelDirectoryError, NotReady
from ddl.replay.devices import moves, placed
from ddl.replay.folder import read_run, unchanged

CONFIG = "SEED = 3\nTRAIN_STEPS = 50\n"


def make(path, *steps, metadata=None, metrics=0):
    (path / "checkpoints").mkdir(parents=True)
    (path / "operative_config.gin").write_text(CONFIG)
    for step in steps:
        (path / "checkpoints" / f"step-{step}.index").write_text("")
        text = json.dumps(metadata or {})
        (path / "checkpoints" / f"step-{step}.json").write_text(text)
    if metrics:
        line = json.dumps({"step": metrics, "epoch": 1.0, "split": "train", "loss": 1.0})
        (path / "metrics.jsonl").write_text(line + "\n")
    return path


def test_a_run(tmp_path):
    run = read_run(make(tmp_path / "run", 10, 30, 20, metadata={"replicas": 2}, metrics=35))
    assert list(run.checkpoints) == [10, 20, 30]
    assert run.reached == 35
    assert run.bindings["SEED"] == "3"
    assert [run.following(step) for step in (1, 10, 11, 30, 31)] == [10, 10, 20, 30, None]
    assert run.metadata_at(34) == {"replicas": 2}
    run.check_step(35)


@pytest.mark.parametrize("step", [0, -3, 36])
def test_a_step_beyond_the_run(tmp_path, step):
    run = read_run(make(tmp_path / "run", 10, metrics=35))
    with pytest.raises(ConfigError, match=rf"from 1 to 35, the last step .* got {step}\."):
        run.check_step(step)


def test_a_run_that_made_no_update(tmp_path):
    run = read_run(make(tmp_path / "run"))
    with pytest.raises(ConfigError, match="neither metrics nor checkpoints"):
        run.check_step(1)


def test_what_is_no_run(tmp_path):
    with pytest.raises(ModelDirectoryError, match="does not exist"):
        read_run(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelDirectoryError, match="is a file"):
        read_run(tmp_path / "file")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelDirectoryError, match="holds no run"):
        read_run(tmp_path / "empty")


def test_a_half_written_run(tmp_path):
    run = make(tmp_path / "run", 10)
    (run / "operative_config.gin").unlink()
    with pytest.raises(ModelDirectoryError, match=r"A run from Python \(ddl.fit\) writes none"):
        read_run(run)
    (run / "config.gin").write_text(CONFIG)
    with pytest.raises(ModelDirectoryError, match=r"no operative_config\.gin"):
        read_run(run)
    (run / "operative_config.gin").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelDirectoryError, match="cannot be read. Restore"):
        read_run(run)


def test_an_export(tmp_path):
    export = tmp_path / "run" / "export"
    (export / "saved_model").mkdir(parents=True)
    with pytest.raises(ModelDirectoryError, match=rf"exported from, such as {tmp_path}/run\."):
        read_run(export)


def test_a_run_on_other_data(tmp_path):
    run = make(tmp_path / "run", 10)
    (run / "sanity_run.txt").write_text("overfit_batch\n")
    with pytest.raises(ModelDirectoryError, match="a real run"):
        read_run(run)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists the locks")
def test_a_run_that_trains(tmp_path):
    run = make(tmp_path / "run", 10)
    descriptor = os.open(run, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        with pytest.raises(NotReady, match="Wait until it ends"):
            read_run(run)
    finally:
        os.close(descriptor)
    read_run(run)


def test_damaged_json_is_unknown(tmp_path):
    run = make(tmp_path / "run", 10)
    (run / "checkpoints" / "step-10.json").write_text("{")
    assert read_run(run).checkpoints == {10: {}}


@pytest.mark.parametrize(
    ("metadata", "flags", "note"),
    [
        (("one_device", 1, "CPU"), ["--strategy=one_device", "--gpus=none"], ""),
        (("mirrored", 4, "CPU"), ["--strategy=mirrored", "--num_virtual_devices=4"], ""),
        (("mirrored", 2, "GPU"), ["--strategy=mirrored", "--gpus=0,1"], ""),
        (
            ("central_storage", 2, "CPU"),
            ["--strategy=central_storage", "--num_virtual_devices=2"],
            "",
        ),
        (
            ("multi_worker_mirrored", 2, "CPU"),
            ["--strategy=mirrored", "--num_virtual_devices=2"],
            "several processes",
        ),
        ((None, 2, None), ["--strategy=mirrored", "--num_virtual_devices=2"], "does not say"),
        ((None, None, None), ["--strategy=one_device", "--gpus=none"], "does not say"),
    ],
)
def test_the_devices_of_a_run(tmp_path, metadata, flags, note):
    values = dict(zip(("strategy", "replicas", "device"), metadata, strict=True))
    run = read_run(make(tmp_path / "run", 10, metadata=values))
    found = placed(run, 5, ["--tf32=on"], {"tf32": "on"})
    assert found.flags == ("--tf32=on", *flags)
    assert note in " ".join(found.notes)
    assert bool(found.notes) == bool(note)
    chosen = placed(run, 5, ["--gpus=none"], {"gpus": "none"})
    assert chosen.flags == ("--gpus=none",)
    detailed = chosen._replace(flags=("--jit_compile=on", "--gpus=none")).flags_in_detail
    assert detailed == ("--gpus=none", "--jit_compile=off")


IN_SHARES = ["--shard_optimizer_state", "--shard_gradients"]
SHARED = {
    **{"strategy": "mirrored", "replicas": 2, "device": "GPU"},
    **{"shard_optimizer_state": True, "shard_gradients": True, "jit_compile": "on", "tf32": True},
}


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ({}, [*IN_SHARES, "--jit_compile=on", "--tf32=on"]),
        ({"gpus": "0,1"}, [*IN_SHARES, "--jit_compile=on", "--tf32=on"]),
        ({"strategy": "one_device"}, [*IN_SHARES, "--jit_compile=on", "--tf32=on"]),
        ({"strategy": "central_storage"}, ["--jit_compile=on", "--tf32=on"]),
        ({"shard_optimizer_state": False, "jit_compile": "off", "tf32": "off"}, []),
    ],
)
def test_flags_that_change_rounding_are_those_of_the_run(tmp_path, chosen, expected):
    run = read_run(make(tmp_path / "run", 10, metadata=SHARED))
    found = [flag for flag in placed(run, 5, [], chosen).flags if "strategy" not in flag]
    assert [flag for flag in found if "gpus" not in flag] == expected


def test_a_run_that_changed_its_shares_is_told(tmp_path):
    folder = make(tmp_path / "run", 10, 20, metadata=SHARED)
    assert list(moves(read_run(folder), {})) == []
    file = folder / "checkpoints" / "step-20.json"
    file.write_text(json.dumps({**SHARED, "shard_optimizer_state": False}))
    (note,) = moves(read_run(folder), {})
    assert "changed --shard_optimizer_state" in note


def test_parameter_servers_do_not_repeat(tmp_path):
    run = read_run(make(tmp_path / "run", 10, metadata={"strategy": "parameter_server"}))
    with pytest.raises(ConfigError, match="asynchronous"):
        placed(run, 5, [], {})


@pytest.mark.parametrize("change", ["new", "written", "removed"])
def test_a_change_of_the_directory_is_seen(tmp_path, change):
    run = make(tmp_path / "run", 10)
    with unchanged([run]):
        pass
    file = run / "checkpoints" / "step-10.json"
    changes = {
        "new": lambda: (run / "picture.png").write_text(""),
        "written": lambda: file.write_text("another text"),
        "removed": file.unlink,
    }
    with pytest.raises(ModelDirectoryError, match="files in it changed"), unchanged([run]):
        changes[change]()


def test_a_change_is_told_beside_another_error(tmp_path):
    run = make(tmp_path / "run", 10)

    def fails():
        (run / "picture.png").write_text("")
        raise ConfigError("the replay failed")

    with pytest.raises(ConfigError, match="the replay failed") as caught, unchanged([run]):
        fails()
    assert "files in it changed: picture.png" in _text_of(caught.value)


def test_a_move_to_other_devices_is_told(tmp_path):
    run = make(tmp_path / "run", 10, 20, metadata={"strategy": "mirrored", "replicas": 2})
    assert list(moves(read_run(run), {})) == []
    (run / "checkpoints" / "step-20.json").write_text('{"strategy": "mirrored", "replicas": 4}')
    (note,) = moves(read_run(run), {})
    assert "moved between devices" in note
    assert list(moves(read_run(run), {"gpus": "none"})) == []
