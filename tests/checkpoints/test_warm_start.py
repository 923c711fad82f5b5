"""Initial weights from a checkpoint of another run."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest

import ddl
from ddl.checkpoints.warm_start import WarmStart
from ddl.errors import ConfigError, ModelDirectoryError
from ddl.run import loop
from tests.checkpoints.test_checkpoints import TwoWorkers
from tests.conftest import make_strategy, save

DATA = (np.ones((4, 6), "float32"), np.zeros(4, "int32"))


def model(units=5, seed=0, prefix="", first=1):
    keras.utils.set_random_seed(seed)
    layers = [
        keras.layers.Dense(4, name=f"{prefix}body_{first}"),
        keras.layers.Dropout(0.5),
        keras.layers.Dense(3, name=f"{prefix}body_{first + 1}"),
        keras.layers.Dense(units, name=f"{prefix}head"),
    ]
    return keras.Sequential([keras.Input((6,)), *layers])


def values(of):
    return {v.path.partition("/")[2]: v.numpy() for v in of.weights}


def assert_equal(found, wanted):
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        np.testing.assert_array_equal(value, wanted[name], err_msg=name)


def trained(task, strategy, **arguments):
    with strategy.scope():
        optimizer = keras.optimizers.SGD(0.1)
        trainer = ddl.Trainer(task(), optimizer, DATA, global_batch_size=4, **arguments)
    trainer.train(2, progress=False)
    return trainer


@pytest.fixture(scope="module")
def there(tmp_path_factory):
    """A model directory, and the weights and averages of its newest checkpoint."""
    folder = tmp_path_factory.mktemp("run")
    rule = ddl.ExponentialMovingAverage(0.5)
    source = trained(
        lambda: ddl.Classification(model(seed=1)),
        make_strategy("mirrored", 2),
        weight_average=rule,
    )
    save(folder / "checkpoints", source)
    with source.evaluation_weights():
        averages = values(source.model)
    return folder, values(source.model), averages


@pytest.mark.parametrize("first", [1, 2, 7])
@pytest.mark.parametrize("place", ["", "checkpoints", "checkpoints/step-2"])
def test_all_weights_however_keras_numbers_the_layers(there, place, first):
    """From a run, a folder or a checkpoint."""
    target = model(first=first)
    report = WarmStart(str(there[0] / place)).apply(target)
    assert_equal(dict(zip(there[1], values(target).values(), strict=True)), there[1])
    assert f"{there[0]}/checkpoints/step-2, digest " in report
    assert f"Read 6 weights: body_{first}" in report


def test_averages_and_averages_of_the_target_follow(there):
    rule = ddl.ExponentialMovingAverage(0.5)
    four = make_strategy("mirrored", 4)
    trainer = trained(lambda: ddl.Classification(model()), four, weight_average=rule)
    WarmStart(str(there[0]), averaged=True).apply(trainer.model, trainer.averages)
    assert_equal(values(trainer.model), there[2])
    with trainer.evaluation_weights():
        assert_equal(values(trainer.model), there[2])


def test_a_regular_expression_and_other_names(there):
    target = model(units=7, prefix="new_")  # a head of another size, which is not read
    before = values(target)
    report = WarmStart(str(there[0]), include="(?!new_head)", rename=("^new_", "")).apply(target)
    found = {name.removeprefix("new_"): value for name, value in values(target).items()}
    heads = {name: before[f"new_{name}"] for name in ("head/kernel", "head/bias")}
    assert_equal(found, {**there[1], **heads})
    assert "new_body_1/bias ← body_1/bias" in report
    assert report.splitlines()[1:] == [
        "  Kept at their initial values: new_head/kernel, new_head/bias.",
        "  In the checkpoint, but not read: head/kernel, head/bias.",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"include": "encoder"}, r"include='encoder'.*at least one .*body_1/kernel"),
        ({"rename": ("^", "old_")}, r"rename=\('\^', 'old_'\).*at least one"),
        ({}, r"head/kernel .*must have the shape .*\(3, 7\), got \(3, 5\).*WarmStart.include"),
    ],
    ids=["include", "rename", "shape"],
)
def test_what_does_not_match_is_an_error_and_changes_nothing(there, arguments, message):
    target = model(units=7)
    before = values(target)
    with pytest.raises(ConfigError, match=message):
        WarmStart(str(there[0]), **arguments).apply(target)
    assert_equal(values(target), before)


def test_workers_start_from_the_checkpoint_of_the_chief(there, monkeypatch):
    """This process plays the second worker, which finds no checkpoint of its own."""
    given = SimpleNamespace(model=model(), averages=None, strategy=None)
    plan = SimpleNamespace(warm_start=WarmStart("absent"))
    heard = [f"{there[0]}/checkpoints/step-2"]
    monkeypatch.setattr(loop, "Workers", lambda _: TwoWorkers(1, heard))
    loop.warm_start(given, plan, loop.RunConsole(shows=False))
    assert_equal(values(given.model), there[1])
    heard.append("Warm start from elsewhere. Read")
    with pytest.raises(ModelDirectoryError, match="one checkpoint, got .* elsewhere"):
        loop.warm_start(given, plan, loop.RunConsole(shows=False))


def test_a_checkpoint_that_is_not_there_or_damaged(tmp_path):
    with pytest.raises(ConfigError, match="must be a model directory, .* got .*absent'"):
        WarmStart(str(tmp_path / "absent")).apply(model())
    (tmp_path / "step-1.index").write_text("cut")
    with pytest.raises(ConfigError, match="step-1'.*"):
        WarmStart(str(tmp_path / "step-1")).apply(model())
    with pytest.raises(ModelDirectoryError, match="(?s)can be read.*step-1"):
        WarmStart(str(tmp_path)).apply(model())
