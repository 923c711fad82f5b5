"""Which parts of a model a rule selects, and the errors of a rule."""

import keras
import pytest
import tensorflow as tf

import ddl
from ddl.errors import ConfigError
from ddl.step.remat import Parts, Remat
from tests.step.remat.models import Subclassed, residual, sequential

DEVICE = tf.distribute.OneDeviceStrategy("CPU:0")


def names(model, **rule):
    return Parts(Remat(**rule), ddl.Classification(model), DEVICE).names


@pytest.fixture(scope="module")
def network():
    return residual()


def test_a_block_lies_between_points_that_one_tensor_passes(network):
    assert names(network) == [
        *("scale", "stem"),
        *("block0_conv … block0_add", "block1_conv … block1_add", "block2_conv … block2_add"),
        *("flatten", "logits"),
    ]


def test_a_pattern_selects_layers_and_blocks_stay_apart(network):
    blocks = [f"block{n}_conv … block{n}_add" for n in range(3)]
    assert names(network, layers="block*") == blocks
    # The activation lies between two selected layers.
    assert names(network, layers=["block1_*m", "block1_add"]) == ["block1_norm", "block1_add"]


def test_parts_of_different_patterns_stay_apart(network):
    found = names(network, layers=["block0_conv", "block0_*"])
    assert found == ["block0_conv", "block0_norm … block0_add"]


def test_parts_are_joined_and_every_second_one_is_left_out(network):
    assert names(network, layers="block*", together=2) == [
        *("block0_conv … block1_add", "block2_conv … block2_add"),
    ]
    assert names(network, layers="block*", every=2) == [
        *("block0_conv … block0_add", "block2_conv … block2_add"),
    ]


def test_parts_with_a_layer_between_them_are_not_joined():
    assert names(sequential(), layers=["dense_0", "dense_1"], together=2) == ["dense_0", "dense_1"]
    joined = names(sequential(), layers=["dense_0", "dropout_0", "dense_1"], together=2)
    assert joined == ["dense_0 … dropout_0", "dense_1"]


def test_masks_and_inputs_do_not_join_blocks():
    gpt = ddl.models.gpt(11, 4, width=4, heads=2, blocks=2, dropout=0.0, packed=True)
    found = names(gpt, layers="block_*")
    assert [name.partition(" ")[0][:7] for name in found] == ["block_1"] * 2 + ["block_2"] * 2


def test_embeddings_are_never_computed_again():
    gpt = ddl.models.gpt(11, 4, width=4, heads=2, blocks=1)
    assert "token_vectors" in [layer.name for layer in gpt.layers]
    assert not [name for name in names(gpt) if "token_vectors" in name]


def test_layers_of_a_subclassed_model_are_parts():
    model = Subclassed()
    model(tf.zeros([2, 6, 6, 1]))
    assert names(model) == ["first", "branch_0", "branch_1", "logits"]
    assert names(model, layers="branch_*", every=2) == ["branch_0"]
    # Its class names the inner layers by a counter.
    inner = model.branches[1].dense.name
    assert names(model, layers=f"branch_1/{inner}") == [f"branch_1/{inner}"]


def test_a_nested_model_is_one_part_unless_the_pattern_leads_into_it():
    inner = residual(2)
    inputs = keras.Input((6, 6, 1))
    outer = keras.Model(inputs, keras.layers.Dense(3, name="head")(inner(inputs)))
    assert names(outer) == ["residual", "head"]
    assert names(outer, layers="residual/block1_*") == ["residual/block1_conv … block1_add"]
    assert names(outer, layers="block1_*") == ["residual/block1_conv … block1_add"]


def test_an_outer_part_holds_the_inner_ones():
    inner = residual(1)
    inputs = keras.Input((6, 6, 1))
    outer = keras.Model(inputs, keras.layers.Dense(3, name="head")(inner(inputs)))
    assert names(outer, layers=["residual", "block0_conv"]) == ["residual"]


def test_models_of_a_task_are_told_apart_by_its_attributes():
    class Two(ddl.Classification):
        pass

    task = Two(residual(1))
    task.extra = keras.layers.Dense(2, name="extra")
    assert Parts(Remat("extra"), task, DEVICE).names == ["extra"]


def test_a_pattern_without_a_match_is_an_error_that_lists_the_layers(network):
    with pytest.raises(ConfigError, match=r"'blocks_\*' matches none.*block1_norm, .*logits"):
        names(network, layers=["block*", "blocks_*"])


def test_layers_that_code_calls_cannot_be_joined():
    model = Subclassed()
    model(tf.zeros([2, 6, 6, 1]))
    with pytest.raises(ConfigError, match="must be 1 for 'first'.*cannot be joined.*Sequential"):
        names(model, together=2)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"layers": []}, "must be a pattern"),
        ({"layers": [3]}, r"must be a pattern.*got \[3\]"),
        ({"together": 0}, "Remat.together must be an integer of at least 1, got 0"),
        ({"every": True}, "Remat.every must be an integer of at least 1, got True"),
    ],
)
def test_a_rule_is_checked(rule, message):
    with pytest.raises(ConfigError, match=message):
        Remat(**rule)
