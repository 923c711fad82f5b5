"""Tables in parts on parameter servers, and data that the workers read from files."""

import re

import pytest
import tensorflow as tf

from ddl.checkpoints.checkpoints import Checkpoints
from tests.training import split_tables
from tests.training.asynchronous import cases
from tests.training.asynchronous.test_loop import run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("cases")


@pytest.fixture(scope="module")
def one_worker(folder):
    names = ("split", "places", "not_finite", "save_split", "files", "damaged_file")
    return run(1, *names, folder=folder)


@pytest.fixture(scope="module")
def two_workers(folder):
    return run(2, "split_counts", "file_counts", folder=folder)


@pytest.mark.slow
def test_one_worker_trains_a_split_table_as_one_device_trains_a_whole_one(one_worker):
    assert one_worker["split"].keys() == split_tables.OPTIMIZERS.keys()
    for optimizer, differences in one_worker["split"].items():
        for kind, difference in differences.items():
            assert difference <= 1e-10, (optimizer, kind)


@pytest.mark.slow
def test_each_server_holds_every_second_part_with_its_slots(one_worker):
    tables, slots, text = one_worker["places"]
    assert [int(device.split("task:")[1][0]) for device in tables] == [0, 1, 0, 1]
    assert slots == tables
    # Weights of 103 · 4 and 63 numbers in float64, their slots, the step and the rate.
    held = [float(size) for size in re.findall(r"\d holds ([\d.e-]+) MB", text)]
    assert 2 * 8 * (103 * 4 + 63) / 1e6 <= sum(held) <= 2 * 8 * (103 * 4 + 63 + 4) / 1e6
    assert min(held) >= 2 * 8 * 51 * 4 / 1e6


@pytest.mark.slow
def test_a_part_that_is_not_finite_is_named(one_worker):
    assert "diverged at step 0: table/embeddings_2 is not finite" in one_worker["not_finite"]


@pytest.mark.slow
def test_checkpoints_fit_any_number_of_servers_and_one_device(one_worker, folder):
    saved = one_worker["save_split"]
    assert saved["step"] == 7
    for servers in (1, 3):
        found = run(1, "restore_split", servers=servers, folder=folder)
        resumed, evaluates = found["restore_split"]
        assert resumed == saved
        # An evaluation leaves the optimizer as it is.
        assert evaluates == {**saved, "optimizer": evaluates["optimizer"]}
    strategy = tf.distribute.OneDeviceStrategy("CPU:0")
    trainer = split_tables.make_trainer(strategy, cases.PARTS, "FusedAdagrad")
    assert cases.digest(trainer) != saved
    Checkpoints(folder, trainer).restore_latest()
    assert cases.digest(trainer) == saved


@pytest.mark.slow
def test_one_worker_trains_on_files_what_one_device_does(one_worker):
    ours, theirs = one_worker["files"]
    assert len(ours) > 3
    assert ours == pytest.approx(theirs, abs=1e-10)


@pytest.mark.slow
def test_a_damaged_record_is_named(one_worker):
    assert "failed: corrupted record at" in one_worker["damaged_file"]
    assert "cannot be read is the record at byte 1,060 of" in one_worker["damaged_file"]


@pytest.mark.slow
def test_every_update_of_every_worker_is_counted(two_workers):
    """With a table in parts, and with data from files."""
    split, files = two_workers["split_counts"], two_workers["file_counts"]
    assert split["counts"] == [205, 205, 205]
    assert split["fell"] < 0.8
    assert files["counts"] == [100, 100, 100]
    ours, theirs = files["evaluations"]
    assert ours == pytest.approx(theirs, abs=1e-5)
