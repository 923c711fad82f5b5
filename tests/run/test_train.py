"""Whole runs in this process: what they write, how they go on, what they refuse."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from tensorboard.plugins.hparams.api_pb2 import Status

from ddl import config
from ddl.distribution.communication import Communication
from ddl.errors import (
    ConfigError,
    DataError,
    ModelDirectoryError,
    TrainingDiverged,
)
from ddl.run import train
from tests.conftest import make_strategy
from tests.run.test_hyperparameters import sessions

CONFIGS = Path(__file__).parents[2] / "configs"
DIGITS_MLP = {"gin_file": "digits_mlp.gin"}
SHORT = ("TRAIN_STEPS = 40", "EVAL_EVERY = 20", "CHECKPOINT_EVERY = 20", "LOG_EVERY = 10")


def run(model_dir, *params, strategy=("one_device", 1), gin_file="digits_cnn.gin", **arguments):
    config.load([str(CONFIGS / gin_file)], [*SHORT, *params])
    placement = train.Placement(
        make_strategy(*strategy),
        Communication(),
        arguments.pop("steps_per_loop", None),
        shard_optimizer_state=arguments.pop("shards", False),
    )
    train.run(placement, None if model_dir is None else str(model_dir), **arguments)


def metrics(model_dir, split):
    lines = [json.loads(line) for line in (model_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["split"] == split]


def tensors(model_dir) -> dict[str, np.ndarray]:
    reader = tf.train.load_checkpoint(str(model_dir / "checkpoints"))
    return {
        name: reader.get_tensor(name)
        for name, dtype in reader.get_variable_to_dtype_map().items()
        if dtype != tf.string
    }


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    model_dir = tmp_path_factory.mktemp("finished") / "run"
    run(model_dir)
    return model_dir


def test_the_macros_are_hyperparameters_beside_the_figures_of_evaluations(finished):
    (hyperparameters,), ends = sessions(finished / "eval")
    assert hyperparameters["TRAIN_STEPS"] == 40
    assert hyperparameters["PRECISION"] == "float32"
    assert "CLIP_NORM" not in hyperparameters  # None
    assert ends == [Status.STATUS_SUCCESS]
    assert sessions(finished / "train") == ([], [])


@pytest.mark.parametrize(
    "content",
    [
        b"\xff\xfe\0",
        bytes(100),
        b"A = " + 10_000 * b"[",
        b"A = {[]: 1}",
        b"B = %B\ncnn.filters = %B",
        b"{{{",
    ],
    ids=["binary", "NUL", "nested", "key", "macro", "bracket"],
)
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_saved_config_that_is_damaged_is_named(finished, tmp_path, content, mode):
    model_dir = tmp_path / "run"
    shutil.copytree(finished, model_dir)
    (model_dir / "operative_config.gin").write_bytes(content)
    before = contents(model_dir)
    with pytest.raises(
        ModelDirectoryError, match=r"(?s)config\.gin .*Restore the file from a backup"
    ):
        run(model_dir, mode=mode)
    assert contents(model_dir) == before


def test_a_run_goes_on_after_a_cut_line_and_an_evaluation(finished, tmp_path, capsys):
    model_dir = tmp_path / "run"
    shutil.copytree(finished, model_dir)
    whole = (model_dir / "metrics.jsonl").read_bytes()
    lines = whole.splitlines(keepends=True)
    # Killed while it wrote the evaluation of its last checkpoint.
    (model_dir / "metrics.jsonl").write_bytes(b"".join(lines[:-1]) + lines[-1][:25])
    run(model_dir, mode="eval")
    assert "removed the incomplete last line of 25 bytes." in capsys.readouterr().out
    assert [line["step"] for line in metrics(model_dir, "eval")] == [20, 40]
    run(model_dir, "TRAIN_STEPS = 60")
    assert [line["step"] for line in metrics(model_dir, "eval")] == [20, 40, 60]


def test_a_damaged_line_is_named_before_an_evaluation(finished, tmp_path, capsys):
    model_dir = tmp_path / "run"
    shutil.copytree(finished, model_dir)
    with (model_dir / "metrics.jsonl").open("ab") as file:
        file.write(b"\xff\xfe\n")
    before = contents(model_dir)
    for arguments in [{"mode": "eval"}, {"mode": "eval", "follow_timeout": 0}]:
        with pytest.raises(ModelDirectoryError, match=r"metrics\.jsonl:\d+ must be a JSON object"):
            run(model_dir, **arguments)
    with pytest.raises(ModelDirectoryError, match=r"metrics\.jsonl:\d+ must be a JSON object"):
        run(model_dir, "TRAIN_STEPS = 60")
    assert "accuracy" not in capsys.readouterr().out
    assert contents(model_dir) == before


REGULARIZED = {"gin_file": "digits_cnn_regularized.gin"}


@pytest.fixture(scope="module")
def regularized(tmp_path_factory) -> Path:
    """A run on two replicas with dropout, an average of the weights and two microbatches."""
    model_dir = tmp_path_factory.mktemp("regularized") / "run"
    run(model_dir, "TRAIN_STEPS = 20", **REGULARIZED, strategy=("mirrored", 2))
    return model_dir


def test_other_microbatches_are_noted_if_statistics_depend_on_them(
    finished, regularized, tmp_path, capsys
):
    shutil.copytree(regularized, tmp_path / "run")
    run(tmp_path / "run", "ACCUMULATION_STEPS = 1", "TRAIN_STEPS = 22", **REGULARIZED)
    assert "ACCUMULATION_STEPS: 2 → 1. This model computes statistics" in capsys.readouterr().out
    shutil.copytree(finished, tmp_path / "other")
    run(tmp_path / "other", "ACCUMULATION_STEPS = 2", "TRAIN_STEPS = 42")
    assert "This model computes statistics" not in capsys.readouterr().out


def test_a_loss_scale_is_logged_and_overflows_are_counted(tmp_path):
    scale = ["Trainer.loss_scale = @LossScale()", "LossScale.initial = 16777216.0"]
    run(tmp_path / "run", "PRECISION = 'mixed_float16'", *scale, **DIGITS_MLP)
    last = metrics(tmp_path / "run", "train")[-1]
    assert last["skipped_updates"] > 0
    assert last["loss_scale"] == 2.0 ** (24 - last["skipped_updates"])
    assert last["step"] == 40


def test_eval_beside_a_run_that_is_further_drops_none_of_its_lines(finished, tmp_path):
    model_dir = tmp_path / "run"
    shutil.copytree(finished, model_dir)
    with (model_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 99, "split": "train"}\n')
    run(model_dir, mode="eval")
    assert [line["step"] for line in metrics(model_dir, "train")][-1] == 99


def test_eval_with_other_metrics(finished, tmp_path):
    model_dir = tmp_path / "run"
    shutil.copytree(finished, model_dir)
    run(model_dir, "Classification.top_k = 3", mode="eval")
    assert metrics(model_dir, "eval")[-1]["top_3_accuracy"] > 0.5


def test_what_diverged_in_the_last_update_is_not_saved(tmp_path):
    # One update: its loss is still finite, what the weights after it give is not.
    rates = ["LEARNING_RATE = 1e38", "TRAIN_STEPS = 1"]
    with pytest.raises(TrainingDiverged, match="evaluation data is not finite"):
        run(tmp_path / "run", *rates, gin_file="digits_mlp.gin")
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_directory_without_checkpoints_can_be_used_again(tmp_path):
    with pytest.raises(TrainingDiverged):
        run(tmp_path / "run", "LEARNING_RATE = 1e6")
    run(tmp_path / "run", "TRAIN_STEPS = 5")
    assert metrics(tmp_path / "run", "train")[-1]["step"] == 5


def test_a_config_with_another_optimizer_than_the_included_one(tmp_path, capsys):
    """The run tells what the swap leaves unused. An integer is a learning rate, too."""
    own = tmp_path / "own.gin"
    swap = "Trainer.optimizer = @RMSprop()\nRMSprop.learning_rate = @LearningRate()\n"
    own.write_text(f"include '{CONFIGS / 'digits_mlp.gin'}'\n{swap}")
    run(None, "LEARNING_RATE = 1", gin_file=own, dry_run=True)
    out = capsys.readouterr().out
    told = "own.gin:2 replaces their items, so these have no effect: SGD."
    assert told in out.replace("\n", "").replace(f"{tmp_path}/", "")
    assert "SGD.momentum = " not in out
    assert "learning rate: 1 at its peak" in out


def test_train_mode_does_not_evaluate(tmp_path):
    run(tmp_path / "run", "TRAIN_STEPS = 10", **DIGITS_MLP, mode="train")
    assert metrics(tmp_path / "run", "eval") == []


def test_a_run_resumes_with_layers_computed_again_and_without(tmp_path):
    plan = ("PRECISION = 'float64'", "EVAL_EVERY = None")
    run(tmp_path / "whole", *plan, **DIGITS_MLP)
    remat = ("Trainer.remat = @Remat()", "Remat.layers = 'hidden*'")
    run(tmp_path / "run", *plan, *remat, "TRAIN_STEPS = 20", **DIGITS_MLP)
    run(tmp_path / "run", *plan, **DIGITS_MLP)
    ours, expected = tensors(tmp_path / "run"), tensors(tmp_path / "whole")
    for name, value in expected.items():
        np.testing.assert_allclose(ours[name], value, rtol=0, atol=1e-10, err_msg=name)


def test_per_replica_form_scales_batch_and_learning_rate(capsys):
    arguments = {"dry_run": True, "gin_file": "digits_cnn_per_replica.gin"}
    params = ("TRAIN_STEPS = None",)
    run(None, *params, strategy=("mirrored", 2), **arguments)
    out = capsys.readouterr().out
    assert "global batch size: 32 = 2 replicas × 16" in out
    assert "learning rate: 0.025 at its peak" in out
    run(None, *params, **arguments)
    assert "learning rate: 0.0125 at its peak" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        (
            ["TRAIN_EPOCHS = 1"],
            ConfigError,
            "TRAIN_STEPS = 40 and TRAIN_EPOCHS = 1. Set one of them to None",
        ),
        (
            ["TRAIN_STEPS = None"],
            ConfigError,
            "TRAIN_STEPS = None and TRAIN_EPOCHS = None. Set one of them.",
        ),
        (["TRAIN_STEPS = '40'"], ConfigError, "TRAIN_STEPS"),
        (["TRAIN_STEP = 40"], ConfigError, "TRAIN_STEP is never used.*TRAIN_STEPS"),
        (
            ["Trainer.shard_optimizer_state = True"],
            ConfigError,
            "Trainer.shard_optimizer_state is never used.*a flag",
        ),
        (["cnn.filter = 40"], ConfigError, "doesn't have a parameter named 'filter'"),
        (["SGD.momentun = 0.5"], ConfigError, "(?s)not recognized.*SGD.momentun = 0.5"),
        (["trian/images.split = 'train'"], ConfigError, "train/images.split"),
        (
            ["GLOBAL_BATCH_SIZE = 63"],
            ConfigError,
            r"a multiple of 2 \(2 replicas × 1 accumulation steps\), got 63",
        ),
        (["PRECISION = 'float16'"], ConfigError, "float16"),
        (["DATA = 'digit'"], ConfigError, "digits"),
        (["NUM_CLASSES = 9"], DataError, "10|9"),
        (["Trainer.task = @Classification"], ConfigError, r"Write @Classification\(\)"),
        (
            ["LEARNING_RATE = -1"],
            ConfigError,
            "The learning rate must be finite and at least 0, got -1 at update 0",
        ),
        (["SEED = -1"], ConfigError, r"SEED\) must be from 0 .* got -1"),
    ],
    ids=str,
)
def test_bad_input_is_an_error_and_leaves_nothing(tmp_path, params, error, message):
    with pytest.raises(error, match=message):
        run(tmp_path / "run", *params, strategy=("mirrored", 2))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (
            ["Retention.best_metric = 'acuracy'"],
            r"of the evaluation \(loss, accuracy\), got 'acuracy'",
        ),
        (["Retention.best_metric = 'loss'", "Trainer.eval_data = None"], "no data to evaluate on"),
        (
            ["Retention.best_mode = 'max'"],
            "Retention.best_mode is 'max', but Retention.best_metric is None",
        ),
        (["RunPlan.on_divergence = 'retry'"], "on_divergence must be .*'rewind'"),
        (["RunPlan.max_rewinds = 0"], "max_rewinds must be greater than 0, got 0"),
        (["RunPlan.warm_start = @WarmStart()"], r"WarmStart.checkpoint|missing.*checkpoint"),
        (["RunPlan.warm_start = @WarmStart()", "WarmStart.checkpoint = '/none'"], "'/none'"),
    ],
    ids=str,
)
def test_bad_plans_are_errors_and_leave_nothing(tmp_path, params, message):
    unused = ("test/images.split", "Retention.best_metric")
    with pytest.raises(ConfigError, match=message):
        run(tmp_path / "run", *params, allow_unused=unused)
    assert list(tmp_path.iterdir()) == []


def test_the_batch_of_a_run_by_replica_cannot_change_on_the_way(tmp_path):
    per_replica = {"gin_file": "digits_cnn_per_replica.gin"}
    model_dir = tmp_path / "run"
    run(model_dir, "TRAIN_STEPS = None", "TRAIN_EPOCHS = 0.5", **per_replica)
    with pytest.raises(ModelDirectoryError, match="global batch size must be 16, .*, got 32"):
        run(
            model_dir,
            "TRAIN_STEPS = None",
            "TRAIN_EPOCHS = 1",
            strategy=("mirrored", 2),
            **per_replica,
        )


def test_another_number_of_replicas_is_noted_on_resuming(finished, tmp_path, capsys):
    model_dir = tmp_path / "run"
    shutil.copytree(finished, model_dir)
    run(model_dir, "TRAIN_STEPS = 42", strategy=("mirrored", 2))
    assert "The number of replicas is now 2; before, it was 1." in capsys.readouterr().out


SCALED = ("BASE_BATCH_SIZE = 16", "SCALING_RULE = 'linear'", "WARMUP_EPOCHS = 0.5")


def test_scaling_and_warm_up_are_printed(capsys):
    """tests/contract/test_macros.py holds that they are used."""
    run(None, *SCALED, dry_run=True)
    reported = " ".join(capsys.readouterr().out.split())
    for numbers in (
        "learning rate: 0.2 at its peak, 0.18",
        "base learning rate: 0.05",
        "learning rate scaling: × 4 (linear, from batch size 16 to 64)",
        "warm-up: gradual, 12 updates from 0",
        "STEPS_PER_EPOCH = 23",
    ):
        assert numbers in reported


COSINE = (
    "LearningRate.schedule = @CosineDecay()",
    "CosineDecay.initial_learning_rate = %LEARNING_RATE",
    "CosineDecay.decay_steps = @steps_after_warmup()",
    "WARMUP_STEPS = 4",
)


def test_a_run_whose_rate_follows_its_length_is_not_lengthened_in_silence(tmp_path):
    model_dir = tmp_path / "run"
    run(model_dir, *COSINE, **DIGITS_MLP)
    rates = [line["learning_rate"] for line in metrics(model_dir, "train")]
    expected = [0.05 * (1 + np.cos(np.pi * (s - 4) / 36)) / 2 for s in (9, 19, 29, 39)]
    np.testing.assert_allclose(rates, expected, rtol=1e-7)
    with pytest.raises(ModelDirectoryError, match="TOTAL_STEPS: 40 → 60"):
        run(model_dir, *COSINE, "TRAIN_STEPS = 60", **DIGITS_MLP)
    # One that only counts its own updates may be.
    shutil.rmtree(model_dir)
    run(model_dir, "WARMUP_EPOCHS = 0.5", **DIGITS_MLP)
    run(model_dir, "WARMUP_EPOCHS = 0.5", "TRAIN_STEPS = 60", **DIGITS_MLP)
    assert metrics(model_dir, "train")[-1]["step"] == 60


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (["WARMUP_EPOCHS = 2"], "the run of 40 updates, got 46 warm-up updates"),
        ([*COSINE, "WARMUP_STEPS = 40"], "takes 40 updates and the run has 40"),
        (["LEARNING_RATE = -0.1"], "learning rate .* must be greater than 0, got -0.1"),
        (["LEARNING_RATE = 0"], "learning rate .* must be greater than 0, got 0"),
        (["SCALING_RULE = 'linear'"], "BASE_BATCH_SIZE .*, got None"),
        (
            ["SCALING_RULE = 'cubic'"],
            "LearningRate.scaling must be .*'linear'.*, got 'cubic'",
        ),
        (["TOTAL_STEPS = 50"], "TOTAL_STEPS must be 40, .*, got 50. Remove the binding"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_bad_learning_rates(params, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        run(tmp_path / "run", *params, **DIGITS_MLP)
    assert not (tmp_path / "run").exists()


def test_a_plateau_in_a_config(tmp_path):
    plateau = (
        "SGD.learning_rate = @ReduceOnPlateau()",
        "ReduceOnPlateau.schedule = @LearningRate()",
        "ReduceOnPlateau.patience = 1",
        "ReduceOnPlateau.min_delta = 1e9",  # nothing is better
        "EVAL_EVERY = 10",
    )
    model_dir = tmp_path / "run"
    with pytest.raises(ConfigError, match="needs evaluations"):
        run(model_dir, *plateau, mode="train", **DIGITS_MLP)
    assert not model_dir.exists()
    run(model_dir, *plateau, "TRAIN_STEPS = 30", **DIGITS_MLP)
    with pytest.raises(ModelDirectoryError, match="EVAL_EVERY: 10 → 20"):
        run(model_dir, *plateau, "EVAL_EVERY = 20", **DIGITS_MLP)
    run(model_dir, *plateau, **DIGITS_MLP)
    rates = [line["learning_rate"] for line in metrics(model_dir, "train")]
    np.testing.assert_allclose(rates, [0.05, 0.05, 0.005, 0.0005], rtol=1e-7)
