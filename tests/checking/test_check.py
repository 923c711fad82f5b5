"""The check finds planted mistakes and no others; its command and its processes."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from ddl import check as door
from ddl.checking import check, check_all, worker
from ddl.checking.configurations import ALL, ONE, RESUMED, WRITER, Configuration
from ddl.checking.recording import Recording
from ddl.checking.report import report_on
from ddl.checking.small_data import examples_for, shortened
from ddl.data import ArraySource, IndexedSource, StreamSource
from ddl.errors import ConfigError
from ddl.step import observing
from tests.checking import planted, right, tiny
from tests.conftest import make_strategy
from tests.processes import forked

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _state_of_a_command():
    """Leaves no flags behind, which the command shares with ddl.main."""
    yield
    for name in door.FLAGS:
        door.FLAGS[name].unparse()


def in_this_process(module, name, configurations, folder, all_of_them=True):
    """Returns the report of a check whose runs are made in this process, one after the other.

    It saves the start of TensorFlow. The tests of the command make them in processes. Unless all
    are asked for, the first one that differs is the last one.
    """
    job = {"factory": f"{module.__name__}:{name}", "folder": str(folder)}
    recordings = {}
    for configuration in (ONE, *configurations):
        strategy = make_strategy(*STRATEGIES[configuration.replicas])
        recordings[configuration] = Recording()
        worker.run(job, configuration, strategy, recordings[configuration])
        if recordings[ONE].failure is not None:  # nothing to compare with
            break
        report = report_on(recordings)
        if not (all_of_them or report.same):
            return report
    return report_on(recordings)


STRATEGIES = {1: ("one_device", 1), 2: ("mirrored", 2), 4: ("mirrored", 4)}
TWO_MICROBATCHES, FOUR_REPLICAS = Configuration(1, 2), Configuration(4, 1)
# Configurations of the planted mistakes that two replicas or microbatches do not show.
SHOWN_BY = {
    "another_branch_on_several_replicas": [FOUR_REPLICAS],
    "a_schedule_in_python": [WRITER, RESUMED],
    "noise_of_a_generator_in_python": [WRITER, RESUMED],
}
# Four replicas, each with two microbatches, where most differs: normalization, loops, masks.
ON_FOUR = {
    "sam_with_synchronized_normalization",
    "repeat_when_average_and_a_counter",
    "masks_and_sparse_embeddings",
}
# What a resumed run must restore. tests/step/verbs/test_update.py resumes gan, sam and byol.
RESUMED_TOO = {
    "two_optimizers",
    "a_counter_in_the_step",
    "every_second_update",
    "a_slow_copy",
    "noise_layers_by_position",
    "a_variational_autoencoder",
    "synchronized_normalization",
    "an_average_of_the_weights",
    "penalties_and_lamb",
}


def test_there_are_many_of_both():
    assert len(planted.EXPECTED) >= 25
    assert len(right.NAMES) >= 25
    assert {*SHOWN_BY} <= {*planted.EXPECTED}
    assert {*right.NAMES} >= ON_FOUR | RESUMED_TOO


@pytest.mark.slow
@pytest.mark.usefixtures("rows_checked_on_one_device")
@pytest.mark.parametrize("name", planted.EXPECTED)
def test_a_planted_mistake_is_found(name, tmp_path):
    configurations = SHOWN_BY.get(name, [TWO_MICROBATCHES, WRITER])
    report = in_this_process(planted, name, configurations, tmp_path, all_of_them=False)
    assert not report.same
    stage, causes = planted.EXPECTED[name]
    first = report.differences[0]
    assert first.stage == stage, report
    assert first.cause.name in causes, report


@pytest.mark.slow
@pytest.mark.usefixtures("rows_checked_on_one_device")
@pytest.mark.parametrize("name", right.NAMES)
def test_a_right_step_gives_no_alarm(name, tmp_path):
    """On two replicas with two microbatches each; after a resume."""
    configurations = [Configuration(4 if name in ON_FOUR else 2, 2)]
    if name in RESUMED_TOO:
        configurations += [WRITER, RESUMED]
    # Normalization is compared with the same number of microbatches.
    reference = [TWO_MICROBATCHES] if "normalization" in name else []
    report = in_this_process(right, name, [*reference, *configurations], tmp_path)
    assert report.same, report
    assert {*configurations} <= {*report.checked}, report
    assert report.values > 30
    assert report.largest < 1e-10


@pytest.mark.slow
@pytest.mark.usefixtures("rows_checked_on_one_device")
def test_rows_of_one_microbatch_are_compared_on_replicas(tmp_path):
    report = in_this_process(right, "gathered_negatives", [TWO_MICROBATCHES, WRITER], tmp_path)
    assert report.same, report
    assert {*report.checked} == {ONE, WRITER}
    (note,) = report.notes
    assert "configurations with several were not checked" in note


@pytest.mark.slow
@pytest.mark.usefixtures("forked_checks")
def test_in_processes_with_all_configurations():
    names = [f"{right.__name__}:weights_in_the_data", f"{planted.__name__}:dropout_of_keras"]
    same, different = check_all(names).values()
    assert same.same, same
    assert list(same.checked) == list(ALL)
    assert {one.configuration for one in different.differences} == {*ALL} - {ONE, RESUMED}


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
        (
            "digits_mlp.gin",
            0,
            ["Classification computes the same everywhere."],
        ),
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
@pytest.mark.usefixtures("forked_checks")
def test_mistakes_of_the_call():
    with pytest.raises(ConfigError, match="cannot be imported"):
        check("tests.checking.planted:absent")


@pytest.mark.slow
@pytest.mark.usefixtures("forked_checks")
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
    per_replica = ["rows", "outputs", "backward", "differentiated"] * 2
    assert events == ["update", "gradients", *per_replica, "reduced", "apply", "applied"]
