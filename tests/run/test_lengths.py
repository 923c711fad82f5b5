"""The lengths that a run computes, and what of a config may be given in them."""

import pytest

from ddl import config
from ddl.distribution.communication import Communication
from ddl.errors import ConfigError
from ddl.run import train
from tests.conftest import make_strategy
from tests.run.test_train import DIGITS_MLP, metrics, run


def test_lengths_that_the_run_knows_are_periods_too(tmp_path):
    periods = ("EVAL_EVERY", "CHECKPOINT_EVERY", "LOG_EVERY", "Retention.every")
    lengths = ("TRAIN_STEPS = @epochs_to_steps()", "epochs_to_steps.epochs = 3")
    params = (*lengths, *(f"{period} = %STEPS_PER_EPOCH" for period in periods))
    model_dir = tmp_path / "run"
    run(model_dir, *params, "Retention.last = 1", **DIGITS_MLP)
    for split in ("train", "eval"):
        assert [line["step"] for line in metrics(model_dir, split)] == [23, 46, 69]
    assert len(list((model_dir / "checkpoints").glob("*.index"))) == 3
    config.load([str(model_dir / "operative_config.gin")])
    placement = train.Placement(make_strategy("one_device", 1), Communication())
    train.run(placement, str(tmp_path / "again"))
    assert metrics(tmp_path / "again", "eval") == metrics(model_dir, "eval")


def test_the_epochs_of_a_step_that_reads_several_batches(tmp_path):
    """The example reads six batches in each update, of 23 in an epoch."""
    wgan = {"gin_file": "../examples/wgan_gp.gin", "mode": "train"}
    train_epochs = ["TRAIN_STEPS = None", "TRAIN_EPOCHS = 2", "EVAL_EVERY = None"]
    run(tmp_path / "run", *train_epochs, "LOG_EVERY = %STEPS_PER_EPOCH", **wgan)
    assert [(line["step"], line["epoch"]) for line in metrics(tmp_path / "run", "train")] == [
        (4, 1.0),
        (8, 2.0),
    ]
    message = "STEPS_PER_EPOCH must be 4, .*update.next.*, got 23. Add STEPS_PER_EPOCH = 4 to"
    with pytest.raises(ConfigError, match=message):
        run(None, "STEPS_PER_EPOCH = None", **wgan)
    with pytest.raises(ConfigError, match="STEPS_PER_EPOCH must be 23, as follows"):
        run(None, "STEPS_PER_EPOCH = 22", **wgan)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (["TRAIN_STEPS = %TOTAL_STEPS"], "%TOTAL_STEPS is used .*RunPlan.train_steps"),
        (["TRAIN_STEPS = None", "TRAIN_EPOCHS = %TOTAL_STEPS"], "%TOTAL.*RunPlan.train_epochs"),
        (["GLOBAL_BATCH_SIZE = %STEPS_PER_EPOCH"], "%STEPS.*for Trainer.global_batch_size"),
        (["images.seed = %STEPS_PER_EPOCH"], "%STEPS_PER_EPOCH.*for Trainer.train_data"),
        (["PRECISION = %TOTAL_STEPS"], "%TOTAL_STEPS is used before.*in call to set_numerics"),
        (["SEED = %TOTAL_STEPS"], "%TOTAL_STEPS is used before .*in scope SEED"),
    ],
    ids=str,
)
def test_what_a_length_follows_from_cannot_be_given_in_it(params, message, tmp_path):
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        run(tmp_path / "run", *params, **DIGITS_MLP)
