import keras
import numpy as np
import pytest

from ddl.errors import ConfigError
from ddl.optimizers import LARS, exclude_from_weight_decay
from ddl.step import gradients as gradient_path


def small_model():
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(4, name="dense"),
            layers.BatchNormalization(name="norm"),
            layers.RMSNormalization(name="scaled"),
            layers.Dense(2, name="out"),
        ]
    )


def decayed(strategy, optimizer, model):
    """The paths of the variables that an update with gradients of zero moves."""
    variables = model.trainable_variables
    for variable in variables:
        variable.assign(np.ones(variable.shape))
    strategy.run(lambda: optimizer.apply([np.zeros(v.shape, "f4") for v in variables], variables))
    return [v.path.split("/", 1)[1] for v in variables if v.numpy().min() < 1]


CASES = {
    None: ["dense/kernel", "out/kernel"],
    ("dense/", "scale$"): ["norm/gamma", "norm/beta", "out/kernel", "out/bias"],
}


@pytest.mark.parametrize("patterns", CASES)
@pytest.mark.parametrize("built_before", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.optimizers.AdamW(0.1, weight_decay=0.5),
        lambda: keras.optimizers.SGD(0.1, momentum=0.9, weight_decay=0.5),
    ],
)
def test_what_a_pattern_finds_does_not_decay(strategy, make, built_before, patterns):
    with strategy.scope():
        model, optimizer = small_model(), make()
        if built_before:
            optimizer.build(model.trainable_variables)
    assert exclude_from_weight_decay(optimizer, patterns) is optimizer
    gradient_path.prepare_optimizer(optimizer, model.trainable_variables, strategy)
    assert decayed(strategy, optimizer, model) == CASES[patterns]


def test_a_pattern_that_finds_nothing_is_told():
    variables = small_model().trainable_variables
    built, later = keras.optimizers.AdamW(), keras.optimizers.AdamW()
    built.build(variables)
    exclude_from_weight_decay(later, ["bias", "embedding"])
    message = r"the pattern 'embedding' matches none of .*dense/kernel"
    with pytest.raises(ConfigError, match=message):
        exclude_from_weight_decay(built, ["bias", "embedding"])
    with pytest.raises(ConfigError, match=message):
        later.build(variables)


def test_a_text_is_not_read_letter_by_letter():
    with pytest.raises(
        ConfigError, match=r"must be a list, got the text 'bias'\. Write \['bias'\]"
    ):
        exclude_from_weight_decay(keras.optimizers.AdamW(), "bias")


def test_a_pattern_has_to_be_one():
    optimizer = exclude_from_weight_decay(keras.optimizers.AdamW(), ["("])
    with pytest.raises(ConfigError, match=r"must contain regular expressions, got '\('"):
        optimizer.build(small_model().trainable_variables)


@pytest.mark.parametrize("optimizer", [keras.optimizers.SGD(0.1), LARS(0.1, weight_decay=0.1)])
def test_an_optimizer_without_weight_decay_is_told(optimizer):
    with pytest.raises(ConfigError, match="needs an optimizer with Keras's weight_decay"):
        exclude_from_weight_decay(optimizer)
