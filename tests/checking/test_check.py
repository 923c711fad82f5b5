"""The check finds planted mistakes and no others; its command and its processes."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from ddl import check as door
from ddl import output
from ddl.checking import check, check_all
from ddl.checking.small_data import examples_for, shortened
from ddl.data import ArraySource, IndexedSource, StreamSource
from ddl.errors import ConfigError
from ddl.step import observing
from tests.checking import planted, right, tiny
from tests.conftest import make_strategy
from tests.processes import forked

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _state_of_a_command(monkeypatch):
    """Leaves neither the flags, which the command shares with ddl.main, nor its name behind."""
    monkeypatch.setattr(output._REPORTS, "program", output._REPORTS.program)
    monkeypatch.setattr(output._REPORTS, "quiet", output._REPORTS.quiet)
    yield
    for name in door.FLAGS:
        door.FLAGS[name].unparse()


def factories(module, names):
    return [f"{module.__name__}:{name}" for name in names]


@pytest.mark.slow
def test_planted_mistakes_are_found():
    names = list(planted.EXPECTED)
    assert len(names) >= 25
    reports = check_all(factories(planted, names))
    found = {name: report for name, report in zip(names, reports.values(), strict=True)}
    missed = [name for name, report in found.items() if report.same]
    assert not missed
    wrong = []
    for name, report in found.items():
        stage, causes = planted.EXPECTED[name]
        first = report.differences[0]
        if first.stage != stage or first.cause.name not in causes:
            wrong.append(f"{name}, expected {stage} ({causes}):\n{report}")
    assert not wrong, "\n\n".join(wrong)


@pytest.mark.slow
def test_right_steps_give_no_alarm():
    assert len(right.NAMES) >= 25
    reports = check_all(factories(right, right.NAMES))
    alarms = [f"{name}:\n{report}" for name, report in reports.items() if not report.same]
    assert not alarms, "\n\n".join(alarms)
    assert all(report.values > 100 for report in reports.values())
    assert all(report.largest < 1e-10 for report in reports.values())


NOISY = """
import gin
import keras


@gin.register
def noisy():
    layers = [keras.layers.Flatten(), keras.layers.Dropout(0.5), keras.layers.Dense(10)]
    return keras.Sequential([keras.Input((8, 8, 1)), *layers])
"""
CONFIG = """
import noisy
include 'digits_mlp.gin'
Classification.model = @noisy()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "status", "texts"),
    [
        ("digits_mlp.gin", 0, ["Classification computes the same everywhere."]),
        ("noisy.gin", 1, ["the layer 'dropout'", "draw by replica", "remedy"]),
    ],
)
def test_the_command(config, status, texts, tmp_path):
    (tmp_path / "noisy.py").write_text(NOISY)
    (tmp_path / "noisy.gin").write_text(CONFIG)
    done = forked.run(
        [
            *(sys.executable, "-m", "ddl.check", f"--gin_file={config}"),
            "--gin_param=PRECISION = 'float64'",
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stdout + done.stderr
    for text in texts:
        assert text in done.stdout, done.stdout


@pytest.mark.slow
def test_mistakes_of_the_call():
    with pytest.raises(ConfigError, match="cannot be imported"):
        check("tests.checking.planted:absent")


@pytest.mark.slow
def test_a_process_that_ends_is_a_difference():
    (only,) = check("tests.checking.tiny:ends").differences
    assert only.stage == "run"
    assert "The process ended with status 3." in str(only)


def test_names_of_functions():
    with pytest.raises(ConfigError, match="the name of a function in a module"):
        check("planted")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--gin_file is required. Pass a config"),
        (["--gin_file=x.gin", "--model_dir=y"], "model_dir"),
    ],
)
def test_bad_flags(flags, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        door.run(["check", *flags])
    assert exit_.value.code == 1
    assert message in capsys.readouterr().err


def test_help_answers_without_tensorflow(capsys):
    with pytest.raises(SystemExit) as exit_:
        door.run(["check", "--help"])
    assert exit_.value.code == 0
    assert "\n--gin_file: " in capsys.readouterr().out
    code = "import sys, ddl.check; sys.exit('tensorflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize("batch", [2, 3, 8, 16])
@pytest.mark.parametrize("length", [1, 2, 7, 16, 17, 32, 60])
def test_the_last_batch_has_padding(batch, length):
    number = examples_for(length, batch)
    assert 0 < number <= length
    assert number % batch
    assert number <= 3 * batch


class Counted(IndexedSource):
    element_spec = {"x": tf.TensorSpec([], tf.float32), "n": tf.TensorSpec([], tf.int64)}  # noqa: RUF012

    def __len__(self):
        return 100

    def gather(self, indices):
        return {"x": tf.cast(indices, tf.float32), "n": indices}


def test_sources_are_cut_and_widened():
    notes = []
    arrays = shortened(ArraySource(x=np.ones(60, "f4"), n=np.arange(60)), 16, notes)
    assert (len(arrays), arrays.element_spec["x"].dtype) == (41, tf.float64)
    counted = shortened(Counted(), 16, notes)
    assert (len(counted), counted.element_spec["x"].dtype) == (41, tf.float64)
    assert counted.gather(tf.range(2))["x"].dtype == tf.float64
    assert not notes
    stream = StreamSource(tf.data.Dataset.from_tensor_slices({"x": np.ones(64, "f4")}))
    assert shortened(stream, 16, notes) is stream
    assert "cannot be cut" in notes[0]


def operations(observer=None) -> int:
    """Returns the number of operations of a traced update."""
    strategy = make_strategy("mirrored", 2)
    with strategy.scope():
        trainer = tiny.trainer(tiny.Tiny(), strategy=strategy)

    def trace():
        trainer.trace()
        graph = trainer._runner.loop._graph
        return len(graph.as_graph_def().node) + sum(
            len(function.node_def) for function in graph.as_graph_def().library.function
        )

    if observer is None:
        return trace()
    with observing.observed_by(observer):
        return trace()


def test_the_hook_adds_nothing_to_the_graph():
    """Its events come in order; an observer that only looks leaves the graph as it is."""
    events = []
    without = operations()
    assert operations(lambda event, **values: events.append(event)) == without
    per_replica = ["rows", "outputs"] * 2
    assert events == ["update", "gradients", *per_replica, "reduced", "apply", "applied"]
