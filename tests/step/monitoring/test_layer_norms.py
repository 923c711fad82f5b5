"""Norms of layers: their values, on any number of replicas, and what they cost when off."""

import types

import keras
import numpy as np
import pytest

import ddl
from ddl.checkpoints.checkpoints import Checkpoints
from ddl.errors import ConfigError
from ddl.figures import OF_LAYERS, is_one_of_many, is_reserved
from ddl.precision import LossScale, set_precision
from ddl.step.monitoring import LayerNorms, layer_norms
from ddl.training.results.progress import format_figures
from tests.conftest import LikeGpus, make_strategy
from tests.step.verbs import own_steps
from tests.training.parity_cases import UNEVEN

pytestmark = pytest.mark.usefixtures("rows_checked_on_one_device")

RATE = 0.1


def make_trainer(place=("one_device", 1), precision="float64", strategy=None, **arguments):
    set_precision(precision)
    keras.utils.set_random_seed(1)
    strategy = strategy or make_strategy(*place)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((6, 6, 1)),
                keras.layers.Rescaling(1 / 255),
                keras.layers.Flatten(),
                keras.layers.Dense(5, "tanh", name="hidden", kernel_regularizer="l2"),
                keras.layers.Dense(3, name="head"),
            ]
        )
        arguments = {"layer_norms": ddl.LayerNorms(), "global_batch_size": 24} | arguments
        return ddl.Trainer(
            ddl.Classification(model), keras.optimizers.SGD(RATE), UNEVEN, **arguments
        )


def of_layers(figures):
    return {name: value for name, value in figures.items() if is_one_of_many(name)}


def test_a_step_of_sgd_moves_each_layer_by_rate_times_gradient():
    trainer = make_trainer(clip_norm=1e9)
    layers = {name: trainer.model.get_layer(name) for name in ("hidden", "head")}
    weights = {
        name: np.concatenate([v.numpy().ravel() for v in layer.trainable_variables])
        for name, layer in layers.items()
    }
    figures = trainer.train(1)
    assert of_layers(figures).keys() == {f"{kind}/{name}" for kind in OF_LAYERS for name in layers}
    gradients = [figures[f"layer_gradient_norm/{name}"] for name in layers]
    assert np.linalg.norm(gradients) == pytest.approx(figures["gradient_norm"], rel=1e-12)
    for name, layer in layers.items():
        after = np.concatenate([v.numpy().ravel() for v in layer.trainable_variables])
        moved = np.linalg.norm(after - weights[name])
        assert moved > 0
        assert figures[f"layer_update_norm/{name}"] == pytest.approx(moved, rel=1e-9)
        assert moved == pytest.approx(RATE * figures[f"layer_gradient_norm/{name}"], rel=1e-9)
        of_weights = figures[f"layer_weight_norm/{name}"]
        assert of_weights == pytest.approx(np.linalg.norm(weights[name]), rel=1e-12)


@pytest.fixture(scope="module")
def on_one_device():
    trainer = make_trainer(clip_norm=0.05)
    return [of_layers(trainer.train(steps)) for steps in (1, 1, 7)]


@pytest.mark.parametrize(
    ("place", "microbatches"),
    [(("mirrored", 2), 1), (("mirrored", 4), 2), (("central_storage", 2), 1)],
    ids=str,
)
def test_are_equal_on_any_number_of_replicas(on_one_device, place, microbatches):
    trainer = make_trainer(place, clip_norm=0.05, accumulation_steps=microbatches)
    for expected, steps in zip(on_one_device, (1, 1, 7), strict=True):
        found = of_layers(trainer.train(steps))
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert found[name] == pytest.approx(value, abs=1e-10), name


@pytest.mark.usefixtures("gpu_path")
def test_are_equal_with_the_choices_for_gpus_and_a_loss_scale(on_one_device):
    trainer = make_trainer(strategy=LikeGpus(2), clip_norm=0.05, loss_scale=LossScale(8.0))
    for expected, steps in zip(on_one_device, (1, 1, 7), strict=True):
        found = of_layers(trainer.train(steps))
        for name, value in expected.items():
            assert found[name] == pytest.approx(value, abs=1e-10), name


def test_a_log_line_holds_the_means_of_its_updates(on_one_device):
    trainer = make_trainer(clip_norm=0.05)
    figures = of_layers(trainer.train(2))
    first, second, _ = on_one_device
    for name, value in figures.items():
        assert value == pytest.approx((first[name] + second[name]) / 2, rel=1e-12)


def test_gradients_count_before_clipping_and_updates_after():
    figures = make_trainer(clip_norm=1e-6, layer_norms=LayerNorms("variable")).train(1)
    kernel = {kind: figures[f"{kind}/head/kernel"] for kind in OF_LAYERS}
    assert kernel["layer_gradient_norm"] > 1e-3
    assert 0 < kernel["layer_update_norm"] <= RATE * 1e-6
    assert "layer_weight_norm/head/bias" in figures


def test_a_skipped_update_does_not_count():
    scale = LossScale(initial=2.0**24)
    trainer = make_trainer(("mirrored", 2), "mixed_float16", loss_scale=scale)
    skipped = 0
    while not trainer.step:
        figures = trainer.train(1)
        skipped = trainer.skipped_updates
    assert skipped, "no gradient overflowed"
    gradient = figures["layer_gradient_norm/head"]
    assert 0 < gradient < 100
    assert figures["layer_update_norm/head"] == pytest.approx(RATE * gradient, rel=1e-2)


def test_an_update_that_is_undone_does_not_count():
    """`Critic` changes weights before its last gradient is known to be finite."""
    trainer = own_steps.build(
        "Critic",
        make_strategy("mirrored", 2),
        precision="mixed_float16",
        examples=48,
        change=own_steps.overflowing("fools", 1, 2),
        loss_scale=LossScale(1024.0),
        max_skipped_updates=1,
        layer_norms=LayerNorms(),
    )
    trainer.train(2)
    state = trainer._runner.loop.run(trainer.state, 3)
    assert (int(state.step), int(state.skipped_in_a_row)) == (2, 1)
    assert not state.layer_norms.numpy().any()


@pytest.mark.parametrize("name", ["Critic", "Grouped"])
def test_in_a_step_of_ones_own_and_with_groups(name):
    figures = [
        own_steps.build(name, make_strategy(*place), layer_norms=LayerNorms()).train(4)
        for place in (("one_device", 1), ("mirrored", 2))
    ]
    one, two = (list(of_layers(each).values()) for each in figures)
    np.testing.assert_allclose(two, one, rtol=0, atol=1e-10)
    names = of_layers(figures[0])
    assert len(names) == 3 * (4 if name == "Critic" else 2)
    if name == "Grouped":  # frozen for 3 of 4 updates
        moved = [v for name, v in names.items() if name.startswith("layer_update_norm/")]
        backbone, head = moved
        assert 0 < backbone < head


def test_compiled():
    plain, compiled = (
        of_layers(make_trainer(("mirrored", 2), jit_compile=choice).train(3))
        for choice in ("off", "on")
    )
    assert plain.keys() == compiled.keys()
    for name, value in plain.items():
        assert compiled[name] == pytest.approx(value, abs=1e-10), name


def test_off_they_cost_nothing():
    trainer = make_trainer(layer_norms=None)
    assert not of_layers(trainer.train(1))
    assert trainer.state.layer_norms.shape == [0]
    assert "layer_norms" not in trainer._parts.update.changing_fields


def test_a_checkpoint_does_not_depend_on_them(tmp_path):
    with_norms, without = make_trainer(), make_trainer(layer_norms=None)
    for saves, restores in ((with_norms, without), (without, with_norms)):
        saves.train(3, [])
        folder = tmp_path / str(restores is without)
        checkpoints = Checkpoints(folder, saves)
        checkpoints.save()
        checkpoints.finish()
        Checkpoints(folder, restores).restore_latest()
        assert restores.step == saves.step
    assert not with_norms.state.layer_norms.numpy().any()


def test_layers_of_one_name_are_told_apart():
    names = [keras.Variable([1.0], name="kernel") for _ in range(3)]
    norms = LayerNorms().of(names, make_strategy("one_device", 1))
    assert list(norms.names) == ["kernel", "kernel_2", "kernel_3"]


def test_variables_of_one_layer_stay_together():
    """Of two layers `head`, the first has no bias; `head_2` is the name of a third layer."""
    paths = ["head/kernel", "head_2/kernel", "head/kernel", "head/bias"]
    variables = [types.SimpleNamespace(path=path) for path in paths]
    norms = LayerNorms().of(variables, make_strategy("one_device", 1))
    assert list(norms.names) == ["head", "head_2", "head_3"]
    assert [norms.places[id(variable)] for variable in variables] == [0, 1, 2, 2]


def test_refusals(monkeypatch):
    with pytest.raises(ConfigError, match=r"LayerNorms.by must be 'layer' or 'variable', got 'x'"):
        LayerNorms("x")
    with pytest.raises(ConfigError, match=r"layer_norms must be a LayerNorms, or None"):
        make_trainer(layer_norms=True)
    asynchronous = types.SimpleNamespace(asynchronous=True)
    monkeypatch.setattr(layer_norms, "traits_of", lambda _: asynchronous)
    with pytest.raises(ConfigError, match="workers update independently. Leave layer_norms out"):
        LayerNorms().of([], make_strategy("one_device", 1))


def test_the_console_leaves_them_out_and_no_metric_may_have_their_names():
    assert format_figures({"loss": 1.0, "layer_update_norm/a": 2.0}) == "loss 1"
    assert is_reserved("layer_weight_norm/a")
