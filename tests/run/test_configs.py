"""Every file under configs/ answers to the standard macros; one of each kind passes a dry run."""

import re

import pytest

from ddl import config
from ddl.distribution.workers import Workers
from ddl.run import train
from tests.conftest import make_strategy
from tests.run.test_train import CONFIGS, run

FILES = sorted(path.name for path in CONFIGS.glob("*.gin"))
MACROS = (
    *("SEED", "GLOBAL_BATCH_SIZE", "EVAL_EVERY", "CHECKPOINT_EVERY", "LEARNING_RATE"),
    *("PRECISION", "CLIP_NORM", "ACCUMULATION_STEPS"),
)
# A value of every macro that is not the config's own.
SET = (
    *("SEED = 7", "GLOBAL_BATCH_SIZE = 20", "TRAIN_STEPS = None", "TRAIN_EPOCHS = 3"),
    *("EVAL_EVERY = 5", "CHECKPOINT_EVERY = 5", "LOG_EVERY = 5", "LEARNING_RATE = 0.003"),
    *("BASE_BATCH_SIZE = 5", "SCALING_RULE = 'linear'", "WARMUP_STEPS = None"),
    *("WARMUP_EPOCHS = 1", "WARMUP_START = 0.5", "PRECISION = 'mixed_float16'"),
    *("CLIP_NORM = 1.0", "ACCUMULATION_STEPS = 2"),
)
# What makes a config small enough to trace it in a second or two, by the beginning of its name.
SMALL = {
    "cifar10_": ["IMAGE_SHAPE = (8, 8, 3)"],
    "cifar10_mlp": ["mlp.hidden_units = (64, 32)"],
    "fashion_mnist_": ["IMAGE_SHAPE = (8, 8, 1)"],
    "large_table": ["ITEMS = 1000", "USERS = 100"],
    "mnist_": ["IMAGE_SHAPE = (8, 8, 1)"],
    "play_": ["LENGTH = 8"],
    "play_bert": ["BLOCKS = 1", "bert.width = 8"],
    "play_gpt": ["gpt.blocks = 1", "gpt.width = 8"],
    "resnet50_": ["IMAGE_SHAPE = (16, 16, 3)", "BLOCKS = (1,)", "resnet.width = 4"],
    "shapes_multi_label": ["BLOCKS = (1,)", "resnet.width = 4"],
}
# Beginnings of configs whose data ddl has.
PACKAGED = ("digits", "large_table", "penguins", "play", "shapes")


def text_with_includes(name: str) -> str:
    text = (CONFIGS / name).read_text()
    included = re.findall(r"^include '(?!standard)(.*)'", text, re.MULTILINE)
    return "".join(text_with_includes(other) for other in included) + text


def stand_ins(name: str, synthetic: bool = False) -> list[str]:
    """What makes a config small enough, and independent of data that are not there."""
    synthetic &= name != "large_table.gin"  # whose data are synthetic in any case
    is_there = name.startswith(PACKAGED) and not synthetic
    params = [] if is_there else ["DATA = 'synthetic'"]
    if "images.name" in text_with_includes(name):
        params.append("images.num_examples = 40")
    return params + [each for start in SMALL if name.startswith(start) for each in SMALL[start]]


@pytest.mark.parametrize("name", FILES)
def test_macros_stand_first_one_a_line(name):
    text = text_with_includes(name)
    for macro in MACROS:
        assert re.search(rf"^{macro} = ", text, re.MULTILINE), macro
    lengths = re.findall(r"^(TRAIN_STEPS|TRAIN_EPOCHS) = (?!None)", text, re.MULTILINE)
    assert lengths, "neither TRAIN_STEPS nor TRAIN_EPOCHS"


# Those whose step is traced, and on how many replicas: one of each task and kind of model.
TRACED = {
    "digits_mlp.gin": 2,
    "large_table.gin": 1,
    "penguins_body_mass.gin": 1,
    "play_bert.gin": 1,
    "play_gpt.gin": 1,
    "resnet50_imagenet_lars_32k.gin": 1,
}


@pytest.mark.parametrize("name", [name for name in FILES if name not in TRACED])
def test_a_trainer_with_every_macro_set(name):
    config.load([str(CONFIGS / name)], [*stand_ins(name), *SET])
    placement = train.Placement(make_strategy("one_device", 1))
    train.build(placement, Workers(placement.strategy))
    config.check_all_used()


@pytest.mark.parametrize("name", TRACED)
def test_a_dry_run_with_every_macro_set(name, capsys, monkeypatch):
    """Exported, which takes as long as the rest, are those that have layers of ddl."""
    monkeypatch.setattr("tests.run.test_train.SHORT", ())
    if name not in ("play_gpt.gin", "large_table.gin"):
        monkeypatch.setattr(train, "export", lambda *_: None)
    params = [*stand_ins(name), *SET]
    strategy = ("mirrored", 2) if TRACED[name] == 2 else ("one_device", 1)
    run(None, *params, gin_file=name, dry_run=True, strategy=strategy)
    shown = capsys.readouterr().out
    assert "One step on one batch: loss" in shown
    effects = ("(3.0 epochs)", "(linear, from batch size 5 to ", "warm-up: gradual, ", "seed: 7")
    assert [effect for effect in effects if effect not in shown] == []
