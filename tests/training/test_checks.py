"""The check before training that all workers read the same data."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import tensorflow as tf

import ddl
from ddl.data import BatchPipeline
from ddl.errors import DataError
from ddl.training.checks import check_same_data


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
        self.both.wait(60)

    def gather_texts(self, text):
        self.texts[self.index] = text
        self.barrier()
        found = list(self.texts)
        self.barrier()
        return found


def difference(here, there):
    """Checks data on two workers; returns the error, which both raise, or None."""
    pipelines = [BatchPipeline(ddl.data.as_source(data), 4) for data in (here, there)]
    texts, both = [None, None], threading.Barrier(2)

    def on_worker(index):
        try:
            check_same_data(Worker(index, texts, both), {"training data": pipelines[index]})
        except DataError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(2) as threads:
        one, two = threads.map(on_worker, range(2))
    assert one == two
    return one


def test_a_file_that_is_missing_is_found_whatever_its_folder(tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    read = lambda paths: ddl.data.tf_records(paths, decode=decode)  # noqa: E731
    files, copies = written(tmp_path), written(other)
    assert difference(read(files), read(copies)) is None
    os.rename(copies[0], renamed := str(other / "another"))
    text = difference(read(files), read([renamed, *copies[1:]]))
    assert "the files of the training data are 3 (digest" in text
    text = difference(read(files), read(files[:2]))
    assert "the examples of the training data are 6 on worker 0 and 4 on worker 1" in text


def test_arrays_that_differ():
    assert difference({"x": np.arange(6)}, {"x": np.arange(6)}) is None
    other = {"x": np.array([0, 1, 2, 3, 5, 4])}
    assert "the 'x' of the training data are digest" in difference({"x": np.arange(6)}, other)


def test_floats_that_differ_are_warned_of(caplog):
    """Machines may round a preprocessing differently."""
    rows = np.arange(6.0)
    assert difference({"x": rows, "y": np.arange(6)}, {"x": rows + 1e-9, "y": np.arange(6)}) is None
    assert "the floats 'x' of the training data are" in caplog.text
