"""Calls that succeed, and the errors of those that do not."""

import re

import gin
import numpy as np
import pytest

from ddl import config
from ddl.errors import ConfigError, DataError
from ddl.models.perceptron import mlp
from tests.config.dummies import complaint


def test_a_refused_value_names_its_binding(load):
    load("Trial.steps = 3\nTrial.rate = -1.0")
    with pytest.raises(ConfigError) as caught:
        config.build("Trial")
    lines = str(caught.value).splitlines()
    assert lines[0] == "Trial cannot be built: rate is -1.0, below 0"
    assert lines[1] == "  run.gin:2: Trial.rate = -1.0"
    assert re.fullmatch(r"  raised in /.*/tests/config/dummies.py:\d+", lines[2])
    assert lines[3] == '    raise ValueError(f"rate is {rate}, below 0")'
    assert len(lines) == 4
    assert type(caught.value.__cause__) is ValueError


def test_a_refused_value_deep_inside_names_the_inner_binding(load):
    load("Trial.tower = @Conv2D()\nConv2D.filters = -3\nConv2D.kernel_size = 3")
    message = complaint(config.build, "Trial")
    assert message.startswith("Conv2D cannot be built: ")
    assert "  run.gin:2: Conv2D.filters = -3" in message
    assert "run.gin:1" not in message


def test_a_value_that_tensorflow_refuses(load):
    gin.external_configurable(mlp, name="large_mlp", module="dummies")
    lines = ("input_shape = (3,)", "num_classes = 2", "hidden_units = (4000000000000000000,)")
    load("".join(f"large_mlp.{line}\n" for line in lines) + "Trial.tower = @large_mlp()")
    message = complaint(config.build, "Trial")
    assert re.match(
        r"large_mlp cannot be built: InvalidArgumentError: .*more than 2\*\*63", message
    )
    assert "  run.gin:3: large_mlp.hidden_units = (4000000000000000000,)" in message


def test_our_own_errors_keep_their_type(load):
    load("Trial.rate = 101.0\nforwarding.momentum = @a/Trial()")
    with pytest.raises(DataError) as caught:
        config.build("forwarding")
    assert type(caught.value) is DataError
    assert str(caught.value) == ("rate is 101.0, a strange one\n  in call to Trial in scope a")


@pytest.mark.parametrize(
    ("text", "name", "wanted"),
    [
        ("", "tower", ["tower.filters"]),
        ("Trial.tower = @wide/tower()", "Trial", ["wide/tower.filters"]),
        ("demanding.amount = 1", "demanding", ["demanding.of"]),
        ("", "Dense", ["Dense.units"]),
        ("", "Heir", ["Heir.amount"]),
        ("calling.what = @a/right.Twin", "b/calling", ["a/right.Twin.of"]),
    ],
)
def test_a_missing_value(load, text, name, wanted):
    load(text)
    message = complaint(config.build, name)
    assert "requires a value for" in message
    assert message.splitlines()[1:] == [f"    {one} = …" for one in wanted]


def test_a_mistyped_scope(load):
    load("Trial.pictures = [@trian/pictures()]\ntrain/pictures.split = 'train'")
    assert complaint(config.build, "Trial").splitlines() == [
        "pictures requires a value for split in scope trian. Did you mean train?",
        "  run.gin:1: Trial.pictures = [@trian/pictures()]",
    ]


def test_integers_of_64_bits_that_no_tensor_can_have(load):
    """A restart changes nothing, as it may after another failure of the memory."""

    @gin.register(module="dummies")
    def allocating(size, seed=0, width=1):
        if size < 10:
            raise MemoryError
        return np.empty(size, np.uint8)

    load("SIZE = 1000000000000000\nallocating.width = 2\nallocating.size = %SIZE")
    lines = complaint(config.build, "allocating").splitlines()
    assert "allocating cannot be built" in lines[0]
    assert "Unable to allocate" in lines[0]
    assert lines[1] == "  run.gin:3: allocating.size = %SIZE"
    assert "test_building.py" in lines[2]
    load("allocating.size = 9\nallocating.seed = 1000000000000000")
    with pytest.raises(MemoryError):
        config.build("allocating")


def test_a_missing_value_that_no_binding_can_give(load):
    load()
    message = complaint(config.build, "BadHeir")
    assert message.startswith("BadHeir cannot be built: ")
    assert "missing 1 required" in message
    assert "No values supplied" not in message


@pytest.mark.parametrize("error", [KeyError("a"), FileNotFoundError("a"), RuntimeError("a")])
def test_errors_of_the_users_code_name_its_line(load, error):
    name = f"crashing_by_{type(error).__name__}"

    @gin.register(name, module="dummies")
    def crashing(size=1):
        raise error

    load(f"{name}.size = 2\nTrial.rate = @{name}()")
    first, binding, place, line = complaint(config.build, "Trial").splitlines()
    assert first == f"{name} cannot be built: {type(error).__name__}: {error}"
    assert binding == f"  run.gin:1: {name}.size = 2"
    assert re.fullmatch(r"  raised in /.*/tests/config/test_building.py:\d+", place)
    assert line == "    raise error"


@pytest.mark.parametrize("error", [MemoryError, ConnectionResetError])
def test_failures_of_the_system_stay_as_they_are(load, error):
    name = f"failing_by_{error.__name__}"

    @gin.register(name, module="dummies")
    def failing():
        raise error

    load()
    with pytest.raises(error):
        config.build(name)


def test_what_builds_itself(load):
    load("tower.filters = @tower()")
    assert "tower refers to itself through its parameters" in complaint(config.build, "tower")


def test_a_model_with_too_long_a_chain_of_layers(load):
    """Keras follows the layers of a functional model by nested calls."""

    @gin.register(module="dummies")
    def deep():
        return deep()

    load()
    message = complaint(config.build, "deep")
    assert message.startswith("deep cannot be built: Python allows ")
    assert "test_building.py needs more. Keras needs one for each layer of a chain" in message


def test_what_is_built_ahead_is_what_the_call_takes(load):
    calls = []

    @gin.register(module="dummies")
    def expensive(size):
        calls.append(size)
        return [size]

    load("Trial.tower = @expensive()\nTrial.steps = %LATER\nexpensive.size = 4\nLATER = None")
    ahead = config.build_bound("Trial", "tower")
    assert ahead == [4]
    assert config.build_bound("Trial", "pictures") is None
    config.set_macro("LATER", ahead[0] * 10)
    values = config.build("Trial").values
    assert values["tower"] is ahead
    assert values["steps"] == 40
    assert calls == [4]
    config.check_all_used()
    assert "Trial.tower = @expensive()\n" in config.operative_config_text()
    load("Trial.tower = @expensive()\nexpensive.size = 5")
    assert config.build_bound("Trial", "tower") == [5]


def test_an_error_ahead_is_explained(load):
    load("Trial.tower = @tower()")
    assert "tower.filters = …" in complaint(config.build_bound, "Trial", "tower")
