"""What configs can name: ddl's own items, users' and those of Keras."""

import re

import keras
import numpy as np
import pytest

from ddl import config
from ddl.config import registry
from tests.config.dummies import halving


def test_registering_twice():
    registry.register_all()
    registry.register_all.cache_clear()
    registry.register_all()
    registry.register(halving, module="dummies")
    assert len(registry.matches("halving")) == 1


def test_register_leaves_the_item_alone(load):
    class Plain:
        def __init__(self, x=1):
            self.x = x

    registry.register(Plain, "PlainOne", module="dummies.plain")
    load("PlainOne.x = 2")
    assert config.build("PlainOne").x == 2
    assert type(config.build("PlainOne")) is Plain
    assert Plain().x == 1


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("SGD", ""),
        ("keras.optimizers.AdamW", ""),
        ("CosineDecay", "initial_learning_rate=0.1, decay_steps=3"),
        ("BinaryCrossentropy", "from_logits=True"),
        ("GlorotUniform", "seed=3"),
        ("L2", "l2=0.1"),
        ("MaxNorm", ""),
        ("scope/Dense", "units=3"),
    ],
)
def test_keras_objects_are_plain(load, name, arguments):
    scope = name.rpartition("/")[0]
    prefix = f"{scope}/" if scope else ""
    short = re.split(r"[/.]", name)[-1]
    load("\n".join(f"{prefix}{short}.{one}" for one in arguments.split(", ") if one))
    built = config.build(name)
    cls = registry.matches(short)[0].wrapped
    assert type(built) is cls
    direct = cls(**eval(f"dict({arguments})"))
    saved, expected = (keras.saving.serialize_keras_object(x) for x in (built, direct))
    for one in (saved, expected):
        one["config"].pop("name", None)
    assert saved == expected
    assert isinstance(keras.saving.deserialize_keras_object(saved), cls)


def test_a_model_of_configured_parts_is_saved_and_loaded(load, tmp_path):
    load("Dense.units = 2\nSGD.momentum = 0.5\nHuber.delta = 2.0")
    inputs = keras.Input((3,))
    model = keras.Model(inputs, config.build("Dense")(inputs))
    model.compile(optimizer=config.build("SGD"), loss=config.build("Huber"))
    model.save(tmp_path / "model.keras")
    restored = keras.saving.load_model(tmp_path / "model.keras")
    assert type(restored.optimizer) is keras.optimizers.SGD
    assert float(restored.optimizer.momentum) == 0.5
    features = np.ones((1, 3), "float32")
    np.testing.assert_array_equal(restored(features), model(features))


def test_a_users_name_means_the_users_item(load):
    """A name that a later version of ddl adds leaves a config as it is."""

    def of_ddl(width=1):
        return ("ddl's", width)

    def of_user(width=1):
        return ("the user's", width)

    registry.register_all()
    registry.register(of_ddl, "newer", module="ddl")
    registry.register(of_user, "newer", module="of_a_user")
    registry.register(of_user, "Dense", module="of_a_user")
    try:
        load("newer.width = 3\nDense.width = 4\nddl.newer.width = 2")
        assert config.build("newer") == ("the user's", 3)
        assert config.build("Dense") == ("the user's", 4)
        assert config.build("ddl.newer") == ("ddl's", 2)
    finally:
        for name in ("of_a_user.newer", "of_a_user.Dense", "ddl.newer"):
            registry.gin_config._REGISTRY.pop(name)
    assert registry.matches("Dense")[0].selector == "keras.layers.Dense"
