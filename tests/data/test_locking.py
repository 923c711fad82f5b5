"""Objects that are not safe for threads; garbage while a lock is held."""

import gc
import threading

import numpy as np
import pytest
from ddl.data.locking import one_at_a_time

import ddl


class OpenFile:
    """A data set that seeks in one file and then reads."""

    def __init__(self, path):
        path.write_bytes(np.arange(4000, dtype="i8").tobytes())
        self.file = open(path, "rb", buffering=0)  # noqa: SIM115

    def __len__(self):
        return 4000

    def __getitem__(self, index):
        self.file.seek(8 * index)
        return {"x": np.frombuffer(self.file.read(8), "i8")[0]}


def test_items_are_read_one_at_a_time(tmp_path):
    source = ddl.data.from_items(OpenFile(tmp_path / "numbers"))
    batches = source.batches(40, 0, seed=1, shuffle=True).take(200)
    read = np.concatenate([batch["x"] for batch in batches.as_numpy_iterator()])
    assert sorted(read[:4000]) == list(range(4000))
    assert sorted(read[4000:]) == list(range(4000))


def test_no_garbage_is_collected_while_a_lock_is_held():
    locks = threading.Lock(), threading.Lock()
    with one_at_a_time(locks[0]):
        with one_at_a_time(locks[1]):
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ValueError, match="inside"), one_at_a_time(locks[0]):
        raise ValueError("inside")
    assert gc.isenabled()
    assert not locks[0].locked()


def test_examples_that_depend_on_the_batch_are_not_found_by_number():
    data = {"token": np.ones((6, 4), int), "length": np.arange(1, 7) % 4 + 1}
    mixture = ddl.data.Mixture([data, data], [0.5, 0.5])
    for wrap in (
        lambda one: ddl.data.skip_damaged(one, limit=1),
        lambda one: ddl.data.subset(one, first=2),
        lambda one: ddl.data.concatenation([one]),
    ):
        with pytest.raises(ddl.errors.DataError, match="those of a Mixture depend on the bat"):
            wrap(mixture)
