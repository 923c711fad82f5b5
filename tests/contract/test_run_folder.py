"""The files of a run: what they hold, and what a second start makes of them."""

import math
import shutil

import pytest
import tensorflow as tf
from tensorboard.plugins.hparams import metadata

from tests.contract import commands


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return commands.finished(tmp_path_factory.mktemp("finished") / "run")


@pytest.fixture
def copy(run, tmp_path):
    return shutil.copytree(run, tmp_path / "run")


def contents(folder):
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def summaries(folder):
    """Yields (step, summary value) of all of TensorBoard's files below a folder."""
    for path in folder.rglob("*.tfevents.*"):
        for event in tf.compat.v1.train.summary_iterator(str(path)):
            for value in event.summary.value:
                yield event.step, value


def test_a_run_leaves_the_documented_files(run):
    names = {path.name for path in run.iterdir()}
    documented = {"config.gin", "operative_config.gin", "metrics.jsonl", "checkpoints"}
    assert names >= documented | {"train", "eval"}
    assert commands.saved_steps(run) == [4, 8, 12]


def test_metrics_have_a_line_for_each_period(run):
    assert [line["step"] for line in commands.lines(run, "train")] == [3, 6, 9, 12]
    assert [line["step"] for line in commands.lines(run, "eval")] == [6, 12]
    for line in commands.lines(run):
        assert line["epoch"] == pytest.approx(line["step"] / 23, rel=1e-4)  # 1,437 / 64
        assert {"loss", "accuracy"} <= line.keys()
        assert all(math.isfinite(line[name]) for name in line.keys() - {"split"})
    for line in commands.lines(run, "train"):
        assert line["learning_rate"] == pytest.approx(0.05)
        assert line["examples_per_second"] > 0
    assert commands.lines(run, "eval")[-1]["loss"] < 2.1  # that of a guess is 2.3


@pytest.mark.parametrize("split", ["train", "eval"])
def test_tensorboard_shows_the_figures_of_metrics(run, split):
    written = [each for each in summaries(run / split) if each[1].tag.endswith("loss")]
    shown = [(step, float(tf.make_ndarray(value.tensor))) for step, value in written]
    for line in commands.lines(run, split):
        assert any(s == line["step"] and v == pytest.approx(line["loss"]) for s, v in shown)


def test_tensorboard_shows_the_macros_as_hyperparameters_and_the_config_as_text(run):
    (start,) = [v for _, v in summaries(run) if v.tag == metadata.SESSION_START_INFO_TAG]
    content = start.metadata.plugin_data.content
    shown = metadata.parse_session_start_info_plugin_data(content).hparams
    assert shown["LEARNING_RATE"].number_value == 0.05
    assert shown["GLOBAL_BATCH_SIZE"].number_value == 64
    assert shown["PRECISION"].string_value == "float32"
    (text,) = [value for _, value in summaries(run) if value.tag == "config"]
    assert b"SGD.momentum = 0.9" in text.tensor.string_val[0]


def test_a_profile_and_short_loops_leave_the_results(run, tmp_path):
    other = commands.finished(tmp_path / "run", flags=("--profile=5:6", "--steps_per_loop=2"))
    assert list(other.rglob("*.xplane.pb"))
    commands.assert_same_end(other, run)


def test_the_operative_config_repeats_the_run(run, tmp_path):
    again = tmp_path / "again"
    ended = commands.ddl_main(f"--gin_file={run}/operative_config.gin", f"--model_dir={again}")
    assert ended.status == 0, ended.err
    commands.assert_same_end(again, run)
    text = (again / "operative_config.gin").read_text()
    assert text == (run / "operative_config.gin").read_text()
    assert "SGD.nesterov = False" in text  # defaults, too


def test_a_seed_that_the_config_leaves_open_is_drawn_and_kept(tmp_path):
    run = commands.finished(tmp_path / "run", "SEED = None", "TRAIN_STEPS = 4", "EVAL_EVERY = None")
    text = (run / "operative_config.gin").read_text()
    (line,) = [line for line in text.splitlines() if line.startswith("SEED = ")]
    assert line.removeprefix("SEED = ").isdecimal()
    commands.finished(run, "SEED = None", "TRAIN_STEPS = 6", "EVAL_EVERY = None")
    assert line in (run / "operative_config.gin").read_text().splitlines()
    assert commands.lines(run)[-1]["step"] == 6


def test_a_finished_run_has_nothing_to_do(copy):
    before = contents(copy)
    assert "step 12" in commands.done(copy).out
    assert contents(copy) == before


def test_a_longer_run_goes_on_from_the_last_checkpoint(run, tmp_path):
    longer = commands.finished(tmp_path / "run", "TRAIN_STEPS = 8")
    assert "step 8" in commands.small(longer).out
    ours, theirs = commands.saved(longer), commands.saved(run)
    assert all((ours[name] == value).all() for name, value in theirs.items())
    assert commands.results(longer)[-1] == commands.results(run)[-1]
    steps = [(line["split"], line["step"]) for line in commands.lines(longer)]
    assert len(set(steps)) == len(steps)


def test_another_config_is_refused_with_the_difference(run):
    before = contents(run)
    ended = commands.small(run, "GLOBAL_BATCH_SIZE = 32", "SGD.momentum = 0.5", "LOG_EVERY = 9")
    commands.assert_error(ended, "GLOBAL_BATCH_SIZE", "64", "32", "SGD.momentum", "0.9", "0.5")
    assert "LOG_EVERY" not in ended.err
    assert contents(run) == before


def test_retention_keeps_the_last_the_best_and_some(tmp_path):
    kept = ("Retention.last = 1", "Retention.every = 4")
    best = ("Retention.best_metric = 'loss'", "EVAL_EVERY = 2", "LEARNING_RATE = 1e-20")
    run = commands.finished(
        tmp_path / "run", *kept, *best, "CHECKPOINT_EVERY = 2", "TRAIN_STEPS = 10"
    )
    assert commands.saved_steps(run) == [2, 4, 8, 10]  # the first of equal ones is the best


def test_a_run_starts_from_the_weights_of_another(run, tmp_path):
    start = ("RunPlan.warm_start = @WarmStart()", f"WarmStart.checkpoint = '{run}'")
    other = commands.finished(tmp_path / "run", *start, "LEARNING_RATE = 1e-20", "TRAIN_STEPS = 1")
    ours, theirs = commands.lines(other, "eval")[0], commands.lines(run, "eval")[-1]
    assert (ours["loss"], ours["accuracy"]) == (theirs["loss"], theirs["accuracy"])


def test_a_cut_last_line_is_written_again(copy, run):
    whole = (copy / "metrics.jsonl").read_bytes()
    (copy / "metrics.jsonl").write_bytes(whole[:-30])
    assert commands.finished(copy, "TRAIN_STEPS = 14", "EVAL_EVERY = None")
    assert commands.results(copy)[:5] == commands.results(run)[:5]


def test_a_damaged_config_is_named(copy):
    (copy / "config.gin").write_bytes(b"\xff\xfe\0")
    before = contents(copy)
    commands.assert_error(commands.small(copy, "TRAIN_STEPS = 14"), "config.gin")
    assert contents(copy) == before


@pytest.mark.parametrize("mode", ["train_and_eval", "eval", "export"])
def test_a_directory_that_is_a_file_is_named(tmp_path, mode):
    (tmp_path / "file").write_text("kept")
    ended = commands.small(tmp_path / "file", flags=(f"--mode={mode}",))
    commands.assert_error(ended, f"{tmp_path}/file")
    assert (tmp_path / "file").read_text() == "kept"
