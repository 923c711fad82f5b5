"""Mistakes in configs: status 1 and a few lines that name the place and the remedy."""

import pytest

from tests.contract.commands import SMALL, assert_error, ddl_main, done

# The lines of own.gin, which follows small.gin; then words of the message.
NAMES = [
    ("TRAIN_STEPZ = 3", "own.gin:1", "TRAIN_STEPZ", "TRAIN_STEPS"),
    ("mlp.hiden_units = (8,)", "own.gin:1", "hiden_units", "hidden_units"),
    ("SGD.momentun = 0.5", "own.gin:1", "no parameter 'momentun'", "momentum"),
    ("Trainer.optimizer = @Adm()", "own.gin:1", "Adm", "Adam"),
    ("LEARNING_RATE = %LERNING_RATE", "own.gin:1", "%LERNING_RATE", "LEARNING_RATE"),
    ("A = %B\nB = %A", "own.gin:1", "%A", "%B"),
    ("TRAIN_STEPS = @total_steps()", "own.gin:1", "itself", "total_steps.train_steps"),
    ("trian/images.split = 'train'", "own.gin:1", "trian", "train/images.split"),
    ("FAR = 3", "own.gin:1", "FAR", "used"),
    ("Adam.beta_1 = 0.9", "own.gin:1", "Adam", "used"),
    ("SEED = 1\nSEED = 2", "own.gin:2", "SEED", "own.gin:1"),
    ("include 'absent.gin'", "own.gin:1", "absent.gin"),
    ("import nowhere_at_all", "own.gin:1", "nowhere_at_all"),
]
SYNTAX = [
    ("LEARNING_RATE = 1/3", "own.gin:1", "1/3"),
    ("SEED = 1\nLEARNING_RATE = 0,05", "own.gin:2", "0.05"),
    ("PRECISION = float32", "own.gin:1", "'float32'"),
    ("Trainer.shuffle = true", "own.gin:1", "True"),
    ("SEED: 5", "own.gin:1", "="),
    ("mlp.hidden_units = (8,", "own.gin:1"),
    ("LEARNING_RATE = 1e999", "own.gin:1", "inf"),
]
TYPES = [
    ("TRAIN_STEPS = 2.5", "own.gin:1", "train_steps", "2.5"),
    ("TRAIN_STEPS = True", "own.gin:1", "train_steps", "True"),
    ("SGD.learning_rate = '0.1'", "own.gin:1", "learning_rate", "'0.1'"),
    ("mlp.hidden_units = 16", "own.gin:1", "hidden_units", "(16,)"),
    ("mlp.hidden_units = (8, True)", "own.gin:1", "hidden_units", "True"),
    ("Classification.metrics = 'accuracy'", "own.gin:1", "metrics", "'accuracy'"),
    ("Trainer.task = @Classification", "own.gin:1", "@Classification()"),
    ("Trainer.optimizer = @SGD", "own.gin:1", "@SGD()"),
    ("Trainer.optimizer = @Dense()\nDense.units = 3", "own.gin:1", "optimizer", "Dense"),
    ("SEED = '%TRAIN_STEPS'", "own.gin:1", "%TRAIN_STEPS"),
    ("Trainer.weight_average = 0.99", "own.gin:1", "weight_average", "ExponentialMovingAverage"),
]
RANGES = [
    ("TRAIN_STEPS = -4", "own.gin:1", "train_steps", "-4"),
    ("TRAIN_STEPS = None", "TRAIN_STEPS", "TRAIN_EPOCHS"),
    ("TRAIN_EPOCHS = 1", "TRAIN_STEPS", "TRAIN_EPOCHS", "12 and 1"),
    ("EVAL_EVERY = 0", "own.gin:1", "eval_every", "got 0"),
    ("LOG_EVERY = 0", "own.gin:1", "log_every", "got 0"),
    ("SEED = -1", "own.gin:1", "SEED", "-1"),
    ("GLOBAL_BATCH_SIZE = 0", "own.gin:1", "GLOBAL_BATCH_SIZE", "got 0"),
    ("GLOBAL_BATCH_SIZE = None", "GLOBAL_BATCH_SIZE", "PER_REPLICA_BATCH_SIZE"),
    ("PER_REPLICA_BATCH_SIZE = 16", "GLOBAL_BATCH_SIZE", "PER_REPLICA_BATCH_SIZE"),
    ("ACCUMULATION_STEPS = 0", "accumulation_steps", "got 0"),
    ("ACCUMULATION_STEPS = 3", "multiple of 3", "64"),
    ("CLIP_NORM = 0.0", "clip_norm", "got 0"),
    ("PRECISION = 'flaot32'", "own.gin:1", "flaot32", "float32"),
    ("PRECISION = 'float16'", "own.gin:1", "mixed_float16"),
    ("SCALING_RULE = 'linaer'", "own.gin:1", "linaer", "linear"),
    ("SCALING_RULE = 'linear'", "BASE_BATCH_SIZE"),
    ("LEARNING_RATE = 0", "learning rate", "got 0"),
    ("WARMUP_STEPS = 12", "12", "warm"),
    ("WARMUP_STEPS = 3\nWARMUP_EPOCHS = 0.1", "WARMUP_STEPS", "WARMUP_EPOCHS"),
    ("Retention.every = 6", "CHECKPOINT_EVERY", "6"),
    ("Retention.best_metric = 'acuracy'", "acuracy", "accuracy"),
    ("Retention.best_metric = 'loss'\nRetention.best_mode = 'max'", "best_mode", "'min'", "'max'"),
    ("RunPlan.warm_start = @WarmStart()", "WarmStart", "checkpoint"),
    ("RunPlan.warm_start = @WarmStart()\nWarmStart.checkpoint = '/none'", "/none"),
    ("RunPlan.callbacks = [@Every()]\nEvery.steps = 0\nEvery.function = @mlp", "steps", "0"),
]
OPTIMIZERS = [
    ("SGD.clipnorm = 1.0", "clipnorm", "clip_norm"),
    ("SGD.loss_scale_factor = 8.0", "loss_scale_factor", "loss_scale"),
]
DATA = [
    ("mlp.num_classes = 9", "from 0 to 8", "9"),
    ("mlp.input_shape = (8, 9, 1)", "(8, 8, 1)", "(8, 9, 1)"),
    ("images.name = 'digit'", "'digit'", "digits"),
    ("images.image_shape = (9, 9, 1)", "image_shape", "(8, 8, 1)"),
    ("train/images.split = 'trian'", "'trian'", "'train'"),
    ("images.data_dir = '/no'\nimages.name = 'mnist'\nimages.image_shape = (28, 28, 1)", "/no"),
    ("Classification.label_name = 'lable'", "lable", "label"),
    ("Trainer.eval_data = None", "test/images.split", "used"),
]


@pytest.mark.parametrize(
    "row", [*NAMES, *SYNTAX, *TYPES, *RANGES, *OPTIMIZERS, *DATA], ids=lambda row: row[0]
)
def test_a_mistake_in_a_config(row, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text, *words = row
    (tmp_path / "own.gin").write_text(text)
    ended = ddl_main(f"--gin_file={SMALL}", "--gin_file=own.gin", "--model_dir=run")
    assert_error(ended, *words)
    assert not (tmp_path / "run").exists()


def test_a_binding_may_be_allowed_to_go_unused():
    done(None, "Adam.beta_1 = 0.9", flags=("--gin_allow_unused=Adam.*",))
