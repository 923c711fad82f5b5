import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.checkpoints.warm_start import WarmStart
from ddl.errors import ConfigError
from tests.conftest import make_strategy, save
from tests.step.verbs.own_steps import build
from tests.training.test_trainer import make_trainer

RULE = ddl.ExponentialMovingAverage(0.5)


def model(units=5, seed=0, prefix="", second="body_2"):
    keras.utils.set_random_seed(seed)
    layers = [
        keras.layers.Dense(4, name=f"{prefix}body_1"),
        keras.layers.Dense(3, name=f"{prefix}{second}"),
        keras.layers.Dense(units, name=f"{prefix}head"),
    ]
    return keras.Sequential([keras.Input((6,)), *layers])


def values(of):
    return {v.path.partition("/")[2]: v.numpy() for v in of.variables}


@pytest.fixture
def there(tmp_path):
    source = model(seed=1)
    tf.train.Checkpoint(model=source).write(str(tmp_path / "source"))
    return str(tmp_path / "source"), values(source)


def test_all_that_can_be_found(there):
    prefix, source = there
    target = model()
    matches = WarmStart(prefix).apply(target)
    assert list(matches.read) == list(source)
    assert not matches.kept
    assert not matches.unused
    for name, value in values(target).items():
        np.testing.assert_array_equal(value, source[name])
    assert str(matches).startswith(f"Warm start from {prefix}. Read 6 weights: body_1/kernel")


@pytest.mark.parametrize("include", ["body_", r"body_\d/", "(?!head)"])
def test_a_prefix_or_a_regular_expression(there, include):
    prefix, source = there
    target = model(units=7)  # a head of another size, which is not read
    before = values(target)
    matches = WarmStart(prefix, include=include).apply(target)
    for name, value in values(target).items():
        np.testing.assert_array_equal(value, (before if "head" in name else source)[name])
    assert list(matches.kept) == ["head/kernel", "head/bias"]
    assert list(matches.unused) == ["head/kernel", "head/bias"]
    assert list(matches.excluded) == ["head/kernel", "head/bias"]
    assert str(matches).splitlines()[1:] == [
        "  Kept at their initial values, since WarmStart.include excludes them: head/kernel, "
        "head/bias."
    ]


def test_other_names(there):
    prefix, source = there
    target = model(prefix="new_")
    matches = WarmStart(prefix, rename=("^new_", "")).apply(target)
    assert matches.read["new_head/bias"] == "head/bias"
    assert "new_head/bias ← head/bias" in str(matches)
    for name, value in values(target).items():
        np.testing.assert_array_equal(value, source[name.removeprefix("new_")])


def test_each_name_is_listed_once(there):
    """Of a weight that is excluded, one that the checkpoint lacks, and one that it has alone."""
    target = model(second="body_3")
    matches = WarmStart(there[0], include="(?!head/bias)").apply(target)
    assert str(matches).splitlines()[1:] == [
        "  Kept at their initial values, since WarmStart.include excludes them: head/bias.",
        "  Kept at their initial values, since the checkpoint lacks them: body_3/kernel, "
        "body_3/bias.",
        "  In the checkpoint, but not in this model: body_2/kernel, body_2/bias.",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"include": "encoder"},
            r"include must match .*, got 'encoder'. The weights are body_1/kernel",
        ),
        ({"rename": ("^", "old_")}, r"none of the weights old_body_1/kernel.*Its weights: body_1"),
        ({"averaged": True}, r"none of the averages body_1/kernel.*Its averages: none"),
    ],
    ids=["include", "rename", "averaged"],
)
def test_nothing_that_matches_is_an_error(there, arguments, message):
    target = model()
    before = values(target)
    with pytest.raises(ConfigError, match=message):
        WarmStart(there[0], **arguments).apply(target)
    for name, value in values(target).items():
        np.testing.assert_array_equal(value, before[name])


def test_another_shape_is_an_error_and_changes_nothing(there):
    target = model(units=7)
    before = values(target)
    message = (
        r"head/kernel .*must have the shape .*\(3, 7\), got \(3, 5\). This model has \d+ "
        r"weights: \d+ match \(body_1/kernel.*\), 2 have another shape \(head/kernel, head/bias\)"
    )
    with pytest.raises(ConfigError, match=message):
        WarmStart(there[0]).apply(target)
    for name, value in values(target).items():
        np.testing.assert_array_equal(value, before[name])


def test_a_checkpoint_that_is_not_there_or_damaged(tmp_path, there):
    with pytest.raises(
        ConfigError, match="must be a checkpoint or a folder with one, got .*absent'"
    ):
        WarmStart(str(tmp_path / "absent")).apply(model())
    with open(f"{there[0]}.index", "r+b") as file:
        file.truncate(100)
    with pytest.raises(ConfigError, match="cannot be read"):
        WarmStart(there[0]).apply(model())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"include": "("}, r"WarmStart.include must be .*, got '\(': .*unterminated"),
        ({"rename": ("^", "\\2")}, r"WarmStart.rename must be .*invalid group reference"),
        ({"rename": ("^",)}, r"must be a pair \(expression, replacement\), got \('\^',\)"),
    ],
    ids=str,
)
def test_expressions_that_are_none(arguments, message):
    with pytest.raises(ConfigError, match=message):
        WarmStart("anywhere", **arguments)


def test_damaged_weights_change_nothing(there):
    with open(f"{there[0]}.data-00000-of-00001", "r+b") as file:
        file.seek(-40, 2)
        file.write(b"!")
    target = model()
    before = values(target)
    with pytest.raises(ConfigError, match="cannot be read"):
        WarmStart(there[0]).apply(target)
    for name, value in values(target).items():
        np.testing.assert_array_equal(value, before[name])


@pytest.mark.parametrize("averaged", [False, True])
def test_from_a_run_of_ddl_on_any_strategy(tmp_path, averaged):
    source = make_trainer(make_strategy("mirrored", 2), weight_average=RULE)
    source.train(3)
    save(tmp_path / "checkpoints", source)
    target = make_trainer(make_strategy("mirrored", 4), weight_average=RULE)
    # Keras counts names up in a process, where a run has one model.
    pairs = zip(target.model.variables, source.model.variables, strict=True)
    rename = {new.path.split("/")[0]: old.path.split("/")[0] for new, old in pairs}
    for new, old in rename.items():
        layer = f"{new}/"
        WarmStart(str(tmp_path), layer, (f"^{new}", old), averaged).apply(target.model)
    target.averages.reset()
    with source.evaluation_weights(averaged=averaged):
        expected = [v.numpy() for v in source.model.variables]
    for variable, value in zip(target.model.variables, expected, strict=True):
        for copy in target.strategy.experimental_local_results(variable.value):
            np.testing.assert_array_equal(copy.numpy(), value)
    assert target.evaluate() == target.evaluate(averaged=False)


def test_from_a_task_without_a_model(tmp_path):
    """The name of the attribute comes first: here `online`, whose target has the same names."""
    byol = build("Byol", make_strategy("one_device", 1), precision="float32", change=with_names)
    byol.train(3)
    prefix = save(tmp_path, byol)
    target = model(units=3)
    WarmStart(prefix, rename=("^", f"online/{byol.task.online.name}/")).apply(target)
    theirs = values(byol.task.online)
    assert theirs.keys() == values(target).keys()
    for name, value in values(target).items():
        np.testing.assert_array_equal(value, theirs[name])


def with_names(task):
    task.online = model(units=3, seed=1)
    task.target = keras.models.clone_model(task.online)
