"""Workers whose data differ from the chief's."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.data import BatchPipeline
from ddl.errors import DataError
from ddl.training.checks import same_data


def written(folder):
    """Files of records, each of which is a number."""
    files, numbers = [], iter(range(6))
    for place, length in enumerate((1, 3, 2)):
        files.append(str(folder / f"part-{place}"))
        with tf.io.TFRecordWriter(files[-1]) as file:
            for _ in range(length):
                file.write(str(next(numbers)).encode())
    return files


def decode(item, seed):
    return {"x": tf.strings.to_number(item["record"], tf.int64)}


class Worker:
    """One of two workers, each in a thread."""

    number = 2

    def __init__(self, index, texts, both):
        self.index, self.texts, self.both = index, texts, both

    def barrier(self):
        self.both.wait(10)

    def gather_texts(self, text):
        self.texts[self.index] = text
        self.barrier()
        found = list(self.texts)
        self.barrier()
        return found

    def gather(self, values):
        return np.array(self.gather_texts(values))


@pytest.fixture
def difference(monkeypatch):
    """Checks data on two workers; returns the error, which both raise, or None."""
    monkeypatch.setattr(same_data, "Workers", lambda strategy: strategy)

    def checked(here, there):
        pipelines = [BatchPipeline(ddl.data.as_source(data), 4) for data in (here, there)]
        texts, both = [None, None], threading.Barrier(2)

        def on_worker(index):
            try:
                data = pipelines[index]
                same_data.check_same_data(Worker(index, texts, both), {"": data}, data)
            except DataError as error:
                return str(error)
            return None

        with ThreadPoolExecutor(2) as threads:
            one, two = threads.map(on_worker, range(2))
        assert one == two
        return one

    return checked


def test_equal_data_pass(difference, tmp_path):
    for make in (
        lambda: {"x": np.arange(6), "name": ["a"] * 6},
        lambda: {"x": [b"a\0", b"b"]},
        lambda: ddl.data.tf_records(written(tmp_path), decode=decode),
        lambda: tf.data.Dataset.range(3).map(lambda x: {"x": x}),
    ):
        assert difference(make(), make()) is None


def test_a_stream_that_cannot_be_repeated_is_refused(difference):
    tf.random.set_seed(None)
    data = tf.data.Dataset.range(100).shuffle(100).map(lambda x: {"x": x})
    assert "Two reads of the first examples of The tf.data.Dataset differ" in difference(data, data)


def test_a_file_that_is_missing_or_cut_is_named(difference, tmp_path):
    def nested(paths):
        half = ddl.data.subset(ddl.data.tf_records(paths, decode=decode), 4)
        return ddl.data.mix([half, half], [0.5, 0.5])

    other = tmp_path / "other"
    other.mkdir()
    files, copies = written(tmp_path), written(other)
    assert difference(nested(files), nested(copies)) is None  # the folder may be another one
    name = os.path.basename(files[2])
    text = difference(nested(files), nested(copies[:2]))
    assert "Worker 1 must read the data of worker 0, but they differ in\n" in text
    assert "\n  files of the training data: 6 (digest" in text
    assert f"\n  only on worker 0: {name} (" in text
    assert text.endswith("Give all workers the same files, and start all of them again.")
    os.truncate(copies[2], 0)
    text = difference(nested(files), nested(copies))
    assert f"\n  only on worker 1: {name} (0 bytes)\n" in text


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ({"x": np.arange(5)}, "examples of the training data: 6 on worker 0, 5 on worker 1"),
        ({"x": np.arange(9)}, "steps per epoch of the evaluation data: 2 on worker 0, 3 on work"),
        ({"x": np.arange(6.0)}, "features of the training data: x int64 () on worker 0, x float64"),
        ({"x": np.array([0, 1, 2, 3, 5, 4])}, "arrays of the training data: digest of rows"),
    ],
)
def test_arrays_that_differ(difference, other, expected):
    assert expected in difference({"x": np.arange(6)}, other)


def test_floats_that_differ_are_warned_of(difference, caplog):
    """Machines may round a preprocessing differently."""
    rows = np.arange(6.0)
    assert difference({"x": rows, "y": np.arange(6)}, {"x": rows + 1e-9, "y": np.arange(6)}) is None
    assert "floats of the training data and evaluation data differ between worker 0" in caplog.text
    both = difference({"x": rows, "y": np.arange(6)}, {"x": rows + 1, "y": np.arange(6)[::-1]})
    assert "arrays of the training data" in both


def test_the_parts_of_a_mixture_may_lie_in_other_folders(difference, tmp_path):
    def mixture(folder):
        (tmp_path / folder).mkdir()
        (tmp_path / "shared").mkdir(exist_ok=True)
        paths = [written(tmp_path / name) for name in (folder, "shared")]
        return ddl.data.mix([ddl.data.tf_records(p, decode=decode) for p in paths], [0.5, 0.5])

    assert difference(mixture("node0"), mixture("node1")) is None


def test_a_trainer_checks_its_data_before_it_builds_the_model(monkeypatch):
    def check(strategy, train, evaluation):
        raise DataError(f"{list(train)} {evaluation.num_examples}")

    monkeypatch.setattr("ddl.training.assembly.check_same_data", check)
    data, other = ({"image": np.zeros([n, 2]), "label": np.arange(n)} for n in (6, 5))
    task = ddl.Classification(ddl.models.mlp((2,), 6))
    with pytest.raises(DataError, match=r"\[''\] 5"):
        ddl.Trainer(task, keras.optimizers.SGD(0.1), data, eval_data=other, global_batch_size=2)
