"""Two workers, of which one is stalled in Python and the other therefore in TensorFlow."""

import re
import signal
import threading
import time

import pytest

from tests.distribution.whole_clusters import addresses, start_worker
from tests.run.whole_runs import ROOT

# The data of worker 1 stall at batch 7, in the loop that begins with batch 5.
SOURCE = """
import json, os, time

import ddl
import gin
import numpy as np

_INDEX = json.loads(os.environ["TF_CONFIG"])["task"]["index"]


def look_up(indices):
    while _INDEX == 1 and indices.max() >= 7 * 8:
        time.sleep(0.1)  # the line that stalls
    images = np.zeros([len(indices), 8, 8, 1], "uint8")
    return {"image": images, "label": indices % 10}


@gin.register
def stalling():
    return ddl.data.RandomAccessSource(look_up, 800)
"""
CONFIG = f"""
import stalling
include '{ROOT}/configs/digits_mlp.gin'

Trainer.train_data = @stalling()
Trainer.shuffle = False
GLOBAL_BATCH_SIZE = 8
LOG_EVERY = 5
EVAL_EVERY = None
"""
LINE = 1 + SOURCE.splitlines().index("        time.sleep(0.1)  # the line that stalls")


class Output:
    """The output of a process so far, which a thread reads."""

    def __init__(self, process):
        self.process, self.lines = process, []
        self.reader = threading.Thread(target=lambda: self.lines.extend(process.stdout))
        self.reader.start()

    def wait_for(self, *patterns, signals=False):
        """Returns the output when it matches all patterns; signals each half second, or not."""
        deadline = time.monotonic() + 120
        while not all(re.search(one, text := "".join(self.lines)) for one in patterns):
            assert self.process.poll() is None, text
            assert time.monotonic() < deadline, text
            if signals:
                self.process.send_signal(signal.SIGQUIT)
            time.sleep(0.5)
        return text


@pytest.mark.slow
def test_dumps_name_the_line_in_python_and_the_first_batch_of_the_loop(tmp_path):
    (tmp_path / "stalling.py").write_text(SOURCE)
    (tmp_path / "stalling.gin").write_text(CONFIG)
    model_dir, hosts = tmp_path / "run", addresses(2)
    flags = [f"--gin_file={tmp_path}/stalling.gin", f"--model_dir={model_dir}", "--mode=train"]
    outputs = [Output(start_worker(index, hosts, *flags)) for index in range(2)]
    loop = "the training loop from step 5 to at most 10, from batch 5 on, for "
    try:
        metrics = model_dir / "metrics.jsonl"
        while not (metrics.exists() and '"step": 5' in metrics.read_text()):
            assert all(output.process.poll() is None for output in outputs), outputs[0].lines
            time.sleep(0.1)
        where = rf'File "{tmp_path}/stalling.py", line {LINE} in look_up'
        outputs[1].wait_for(where, loop, signals=True)
        assert "in look_up" not in outputs[0].wait_for(loop, signals=True)
        outputs[1].process.kill()
        assert outputs[0].process.wait(60) == 77
    finally:
        for output in outputs:
            output.process.kill()
            output.reader.join()
            output.process.wait()
    (report,) = (model_dir / "stacks").iterdir()
    assert loop in report.read_text()
