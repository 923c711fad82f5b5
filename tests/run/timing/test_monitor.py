"""The goodput and the spans of whole runs, which are killed and start again."""

import json
import sys
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.errors import ConfigError
from ddl.precision import set_precision
from ddl.run.timing.goodput import read
from ddl.training.actions import EachLoop
from tests.processes import forked
from tests.run.whole_runs import ROOT

DATA = {
    "image": np.random.default_rng(0).normal(size=(64, 4)).astype("f4"),
    "label": np.arange(64) % 3,
}


class Killed(BaseException):
    pass


class Breaking(ddl.Classification):
    """Its loss is not finite for an example of sevens."""

    def per_example(self, features, training):
        found = super().per_example(features, training)
        is_seven = tf.reduce_all(features["image"] == 7, axis=1)
        return ddl.PerExample(tf.where(is_seven, np.nan, found.loss), found.metrics)


def make_trainer(data=DATA, task=ddl.Classification, **arguments):
    set_precision("float32")
    keras.utils.set_random_seed(1)
    model = ddl.models.mlp((4,), 3, hidden_units=(4,))
    arguments = {"eval_data": DATA, "global_batch_size": 16, "steps_per_loop": 5, **arguments}
    return ddl.Trainer(task(model), keras.optimizers.SGD(0.1), data, **arguments)


def test_a_restarted_run_knows_its_repeated_updates(tmp_path, capsys):
    def kill(step):
        if step == 25:
            raise Killed

    plan = {"log_every": 10, "checkpoint_every": 10, "eval_every": 10}
    before = time.time()
    with pytest.raises(Killed):
        ddl.fit(make_trainer(), tmp_path, train_steps=30, actions=[EachLoop(kill)], **plan)
    killed = read(tmp_path / "goodput.json")
    assert (killed.starts, killed.reached, killed.repeated) == (1, 25, 0)
    assert "Goodput" not in capsys.readouterr().out
    ddl.fit(make_trainer(), tmp_path, train_steps=30, spans=True, **plan)
    shown = capsys.readouterr().out
    assert [x for x in shown.splitlines() if x.startswith("Goodput ") and " in 2 starts; " in x]
    life = read(tmp_path / "goodput.json")
    assert (life.starts, life.reached, life.repeated) == (2, 30, 5)
    assert before <= life.first <= life.written <= time.time() + 0.01
    # Rounded to milliseconds in the file.
    assert sum(life.seconds.values()) == pytest.approx(life.written - life.first, abs=0.01)
    # The first loop of each process counts as tracing, also that of the repeated updates.
    assert life.seconds["down"] >= 0
    for kind in ("loop", "tracing", "evaluation", "saving", "restoring", "start_up"):
        assert life.seconds[kind] > 0, kind
    (file,) = (tmp_path / "spans").iterdir()
    names = [event["name"] for event in json.loads(file.read_text())]
    assert {"the training loop", "an evaluation", "saving a checkpoint", "the run"} <= {*names}
    ddl.fit(make_trainer(), tmp_path, train_steps=30)  # nothing is left to do
    assert read(tmp_path / "goodput.json") == life


def test_loops_of_repeated_updates(tmp_path):
    """A life that has reached step 100 already: all loops but the first repeat updates."""
    life = {"first": 1.0, "written": 1.0, "starts": 1, "reached": 100, "repeated": 0}
    (tmp_path / "goodput.json").write_text(json.dumps({**life, "seconds": {}}))
    ddl.fit(make_trainer(), tmp_path, train_steps=20)
    life = read(tmp_path / "goodput.json")
    assert life.seconds["loop"] == 0
    assert life.seconds["repeated"] > 0
    assert life.seconds["down"] > 1e9
    assert (life.repeated, life.reached) == (20, 100)


def test_updates_after_a_rewind_are_repeated_ones(tmp_path):
    images = np.random.default_rng(0).normal(size=(4 * 30, 4)).astype("f4")
    images[4 * 12] = 7  # in batch 12, which update 13 reads
    trainer = make_trainer(
        {"image": images, "label": np.arange(len(images)) % 3},
        Breaking,
        **{"eval_data": None, "global_batch_size": 4, "steps_per_loop": 1, "shuffle": False},
    )
    ddl.fit(trainer, tmp_path, train_steps=20, checkpoint_every=10, on_divergence="rewind")
    life = read(tmp_path / "goodput.json")
    assert int(trainer.state.rewinds) == 1
    assert (life.starts, life.reached, life.repeated) == (1, 20, 13 - 10)
    assert life.seconds["repeated"] > 0
    assert life.seconds["restoring"] > 0


def test_spans_need_a_directory():
    with pytest.raises(ConfigError, match="spans needs a place to write to. Pass model_dir"):
        ddl.fit(make_trainer(), train_steps=1, spans=True)


@pytest.mark.slow
def test_a_killed_command(tmp_path):
    model_dir = tmp_path / "run"
    command = [
        *(sys.executable, "-m", "ddl.main", f"--gin_file={ROOT}/configs/digits_mlp.gin"),
        *(f"--model_dir={model_dir}", "--spans", "--gin_param=CHECKPOINT_EVERY = 20"),
    ]
    process = forked.Popen([*command, "--gin_param=TRAIN_STEPS = 1000000"], cwd=ROOT)
    while not (model_dir / "checkpoints" / "step-20.index").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    first = read(model_dir / "goodput.json")
    assert first.starts == 1
    assert first.seconds["start_up"] > 0
    steps = f"--gin_param=TRAIN_STEPS = {first.reached + 2000}"
    done = forked.run([*command, steps], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    life = read(model_dir / "goodput.json")
    assert life.starts == 2
    assert life.seconds["down"] > 0
    assert life.seconds["restoring"] > 0
    assert sum(life.seconds.values()) == pytest.approx(life.written - life.first, abs=0.01)
    assert done.stdout.splitlines()[-1].startswith("Goodput ")
    of_killed, of_whole = sorted((model_dir / "spans").iterdir(), key=lambda x: x.stat().st_mtime)
    assert json.loads(of_killed.read_text() + "]")
    assert json.loads(of_whole.read_text())[-1]["name"] == "the run"
