"""Checks of values that need no registered item, and so no TensorFlow."""

import typing

import pytest

from ddl.config import read, registry
from ddl.config.early_checks import annotation_of, check_values
from ddl.config.signatures import UNKNOWN, signature_of
from ddl.errors import ConfigError

OWN = registry.OWN  # the fixture of this folder empties it


@pytest.fixture(autouse=True)
def _with_own_items(monkeypatch):
    monkeypatch.setattr(registry, "OWN", OWN)


def check(write, text, *params, **options):
    _, bindings = read([write(f"include 'standard.gin'\n{text}")], params)
    check_values(bindings, **{"names_are_of_libraries": True, **options})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "TRAIN_STEPS = -4",
            "RunPlan.train_steps must be greater than 0, got -4. Set TRAIN_STEPS to the number of "
            "updates of the run.\n  run.gin:2: TR",
        ),
        ("TRAIN_STEPS = 9007199254740993", "RunPlan.train_steps must be at most 2^53 = "),
        (
            "EVAL_EVERY = 0",
            "RunPlan.eval_every must be greater than 0, got 0. Set EVAL_EVERY to a number of "
            "updates, or to None to evaluate only at the end.\n  run.gin:2: EV",
        ),
        ("TRAIN_EPOCHS = -0.5", "RunPlan.train_epochs must be greater than 0, got -0.5."),
        ("LOG_EVERY = 0", "RunPlan.log_every must be greater than 0, got 0. Set LOG_EVERY to"),
        ("CHECKPOINT_EVERY = %OF\nOF = -1", "RunPlan.checkpoint_every must be greater than 0, got"),
        ("SEED = -1", "seed (macro SEED) must be from 0 to 2^31 - 1, got -1. Set SEED to such a"),
        ("GLOBAL_BATCH_SIZE = 0", "GLOBAL_BATCH_SIZE must be at least 1, got 0. Set it to the"),
        ("PER_REPLICA_BATCH_SIZE = 0", "PER_REPLICA_BATCH_SIZE must be at least 1, got 0."),
        ("TRAIN_STEPS = 2.5", "run.gin:2: RunPlan.train_steps must be "),
        ("SCALING_RULE = 'linaer'", "run.gin:2: LearningRate.scaling must be "),
        ("ACCUMULATION_STEPS = None", "run.gin:2: Trainer.accumulation_steps must be "),
        ("cnn.num_classes = 9223372036854775808", "run.gin:2: cnn.num_classes must fit into 64 b"),
        ("Dense.units = 9223372036854775808", "run.gin:2: Dense.units must fit into 64 bits"),
        ("ddl.RunPlan.max_rewinds = 'a'", "run.gin:2: RunPlan.max_rewinds must be "),
    ],
)
def test_values(write, text, message):
    with pytest.raises(ConfigError) as caught:
        check(write, text)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    "text",
    [
        "TRAIN_STEPS = 9007199254740992\nSEED = 2147483647",
        "SEED = None\nEVAL_EVERY = None\nTRAIN_EPOCHS = 0.5\nCLIP_NORM = {'a': None}",
        "LENGTHS = (30, 60)\nepochs_to_steps.epochs = %LENGTHS",  # the types of an overload differ
        "RunPlan.retention = @Retention()\nTrainer.loss_scale = 3",  # a type of ddl's own
        "TRAIN_STEPS = -4\nRunPlan.train_steps = 5",
        "TRAIN_STEPS = -4\nddl.RunPlan.train_steps = 5",
    ],
)
def test_values_that_pass(write, text):
    check(write, text)


def test_an_item_of_the_user_may_have_the_name_of_one_of_ddl(write):
    check(write, "RunPlan.train_steps = 'a'\ncnn.filters = -1", names_are_of_libraries=False)
    with pytest.raises(ConfigError, match="got 'a'"):
        check(write, "TRAIN_STEPS = 'a'", names_are_of_libraries=False)


def is_known(annotation):
    return annotation is not UNKNOWN and all(map(is_known, typing.get_args(annotation)))


def test_types_read_from_the_source_are_those_of_the_items():
    registry.register_all()
    known = set()
    for path in OWN:
        name = path.partition(":")[2]
        item = registry.matches(f"ddl.{name}")[0].wrapped
        for parameter, annotation in signature_of(item).annotations.items():
            early = annotation_of(name, parameter)
            if is_known(early):
                assert early == annotation, f"{name}.{parameter}"
                known.add(f"{name}.{parameter}")
    assert len(known) > 60
    assert {"set_numerics.precision", "LearningRate.scaling", "Trainer.clip_norm"} <= known
    assert annotation_of("Trainer", "task") is UNKNOWN
