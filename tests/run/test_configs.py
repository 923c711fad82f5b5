"""Every file under configs/ answers to the standard macros and passes a dry run."""

import re

import pytest

from tests.run.test_train import CONFIGS, run

FILES = sorted(path.name for path in CONFIGS.glob("*.gin"))
MACROS = [
    "SEED",
    "GLOBAL_BATCH_SIZE",
    "EVAL_EVERY",
    "CHECKPOINT_EVERY",
    "LEARNING_RATE",
    "PRECISION",
    "CLIP_NORM",
    "ACCUMULATION_STEPS",
]


def text_with_includes(name: str) -> str:
    text = (CONFIGS / name).read_text()
    included = re.findall(r"^include '(digits.*)'", text, re.MULTILINE)
    return "".join(text_with_includes(other) for other in included) + text


def stand_ins(name: str) -> list[str]:
    """What makes a config small enough, and independent of data that are not there."""
    params = [] if name.startswith(("digits", "play", "large")) else ["DATA = 'synthetic'"]
    if "imagenet" in name:
        params += ["IMAGE_SHAPE = (16, 16, 3)", "BLOCKS = (1,)", "GLOBAL_BATCH_SIZE = 16"]
        params += ["ACCUMULATION_STEPS = 2"]
    if "lamb" in name:
        params += ["GLOBAL_BATCH_SIZE = 64"]
    if name == "cifar10_mlp.gin":
        params += ["mlp.hidden_units = (64, 32)"]
    if name == "digits_resnet_goyal.gin":
        params += ["resnet.blocks = (1,)"]
    return params


@pytest.mark.parametrize("name", FILES)
def test_macros_stand_first_one_a_line(name):
    text = text_with_includes(name)
    for macro in MACROS:
        assert re.search(rf"^{macro} = ", text, re.MULTILINE), macro
    lengths = re.findall(r"^(TRAIN_STEPS|TRAIN_EPOCHS) = (?!None)", text, re.MULTILINE)
    assert lengths, "neither TRAIN_STEPS nor TRAIN_EPOCHS"


@pytest.mark.parametrize("name", FILES)
def test_the_header_gives_the_command(name):
    first = (CONFIGS / name).read_text().splitlines()[0]
    assert first.startswith(f"# python -m ddl.main --gin_file=configs/{name} --model_dir=")


@pytest.mark.parametrize("name", FILES)
def test_dry_run(name, capsys, monkeypatch):
    monkeypatch.setattr("tests.run.test_train.SHORT", ())
    run(None, *stand_ins(name), gin_file=name, dry_run=True)
    assert "One step on one batch: loss" in capsys.readouterr().out


# One config of each model and optimizer: to trace a second replica of all takes a minute.
# tests/run/test_train.py runs the regularized config on two replicas.
ON_TWO_REPLICAS = {
    *("digits_mlp.gin", "digits_cnn_per_replica.gin", "digits_cnn_lars.gin"),
    "digits_resnet_goyal.gin",
}


@pytest.mark.parametrize("name", FILES)
def test_every_macro_can_be_set(name, capsys, monkeypatch):
    monkeypatch.setattr("tests.run.test_train.SHORT", ())
    batch = "PER_REPLICA_BATCH_SIZE" if "per_replica" in name else "GLOBAL_BATCH_SIZE"
    run(
        None,
        *stand_ins(name),
        "SEED = 7",
        f"{batch} = 20",
        "TRAIN_STEPS = None",
        "TRAIN_EPOCHS = 3",
        "EVAL_EVERY = 5",
        "CHECKPOINT_EVERY = 5",
        "LOG_EVERY = 5",
        "LEARNING_RATE = 0.003",
        "BASE_BATCH_SIZE = 5",
        "SCALING_RULE = 'linear'",
        "WARMUP_STEPS = None",
        "WARMUP_EPOCHS = 1",
        "WARMUP_START = 0.5",
        "PRECISION = 'mixed_float16'",
        "CLIP_NORM = 1.0",
        "ACCUMULATION_STEPS = 2",
        gin_file=name,
        dry_run=True,
        strategy=("mirrored", 2) if name in ON_TWO_REPLICAS else ("one_device", 1),
    )
    shown = capsys.readouterr().out
    assert "One step on one batch: loss" in shown
    for effect in (
        "(3.0 epochs)",
        "(linear, from batch size 5 to ",
        "warm-up: gradual, ",
        "seed: 7",
    ):
        assert effect in shown, effect
