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
