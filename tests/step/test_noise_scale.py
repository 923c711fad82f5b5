"""On a problem whose gradients are known, ½·|w - x|² for each example x; w stands still."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.checkpoints.checkpoints import Checkpoints
from ddl.data import load_digits
from ddl.errors import ConfigError
from ddl.precision import set_precision
from tests.conftest import make_strategy, save
from tests.training.test_trainer import UNEVEN

pytestmark = pytest.mark.usefixtures("rows_checked_on_one_device")

FEATURES = 5
TOGETHER = [("one_device", 1, 4), ("mirrored", 2, 2), ("mirrored", 4, 1), ("central_storage", 2, 2)]


class Distance:
    """The gradient of an example x is w - x; that of a batch, w less its mean."""

    def __init__(self):
        x = keras.Input((FEATURES,), name="x")
        table = keras.layers.Embedding(1, FEATURES, embeddings_initializer="zeros", name="w")
        self.model = keras.Model(x, table(keras.ops.cast(x[:, 0] * 0, "int32")))

    def per_example(self, features, training):
        w = self.model(features["x"], training=training)
        return ddl.PerExample(tf.reduce_sum((w - tf.cast(features["x"], w.dtype)) ** 2, -1) / 2)


def examples(count, mean=0.5, deviation=2.0):
    random = np.random.default_rng(0)
    return mean + deviation * random.normal(size=(count, FEATURES))


def make_trainer(place, x, batch, decay=0.99, precision="float64", **arguments):
    set_precision(precision)
    strategy, microbatches = make_strategy(*place[:2]), place[2]
    with strategy.scope():
        return ddl.Trainer(
            Distance(),
            keras.optimizers.SGD(1e-30),
            {"x": x} if isinstance(x, np.ndarray) else x,
            global_batch_size=batch,
            accumulation_steps=microbatches,
            gradient_noise_scale=ddl.GradientNoiseScale(decay),
            **arguments,
        )


def estimates(x, batch, parts):
    """|G|² and tr Σ from each batch, in order: appendix A.1, with NumPy."""
    found = []
    for rows in x.reshape(-1, batch, FEATURES):
        large = np.sum(rows.mean(0) ** 2)
        small = np.mean(np.sum(rows.reshape(parts, -1, FEATURES).mean(1) ** 2, -1))
        b = batch / parts
        found.append(
            [(batch * large - b * small) / (batch - b), (small - large) / (1 / b - 1 / batch)]
        )
    return np.array(found)


@pytest.mark.parametrize("place", TOGETHER, ids=str)
def test_is_the_estimate_of_the_paper_the_same_for_equal_parts(place):
    x = examples(96)
    trainer = make_trainer(place, x, 16, decay=0.75, shuffle=False)
    average = np.zeros(2)
    for new in estimates(x, 16, 4):
        figures = trainer.train(1)
        average = 0.75 * average + 0.25 * new
        np.testing.assert_allclose(trainer.state.gradient_noise, average, rtol=0, atol=1e-12)
        expected = average[1] / average[0] if (average > 0).all() else None
        assert figures.get("gradient_noise_scale") == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("place", [("one_device", 1, 2), ("mirrored", 4, 2)], ids=str)
def test_tells_a_known_noise_scale(place):
    """20 for examples of deviation 2 around ½: tr Σ = 4·5, |G|² = 5/4. Less chance of the draw."""
    x = examples(16384)
    truth = np.sum(x.var(0, ddof=1)) / np.sum(x.mean(0) ** 2)
    assert truth == pytest.approx(16, rel=0.1)
    trainer = make_trainer(place, x, 64, decay=0.999)
    figures = trainer.train(1024)  # four epochs, each in another order
    assert figures["gradient_noise_scale"] == pytest.approx(truth, rel=0.05)


@pytest.mark.parametrize(
    "place",
    [("one_device", 1, 4), ("mirrored", 2, 1), ("mirrored", 2, 2), ("central_storage", 2, 2)],
    ids=str,
)
def test_does_not_touch_an_update(place):
    """Weights, slots and averages keep their bits beside clipping, which shares the norms."""

    def trained(noise_scale):
        set_precision("float32")
        keras.utils.set_random_seed(0)
        strategy = make_strategy(*place[:2])
        with strategy.scope():
            trainer = ddl.Trainer(
                ddl.Classification(
                    ddl.models.cnn(
                        *((8, 8, 1), 10), blocks=((4,),), hidden_units=(), batch_normalization=True
                    )
                ),
                keras.optimizers.SGD(0.05, momentum=0.9),
                load_digits("train"),
                global_batch_size=64,
                accumulation_steps=place[2],
                clip_norm=0.1,
                weight_average=ddl.ExponentialMovingAverage(0.9),
                gradient_noise_scale=noise_scale,
            )
        trainer.train(5)
        made = trainer.model.variables, trainer.optimizer.variables, trainer.averages.variables
        return [variable.numpy() for variables in made for variable in variables]

    for ours, plain in zip(trained(ddl.GradientNoiseScale()), trained(None), strict=True):
        np.testing.assert_array_equal(ours, plain)


def test_the_loss_scale_does_not_matter():
    x = examples(64)
    ours, plain = (
        make_trainer(("mirrored", 2, 2), x, 16, loss_scale=scale)
        for scale in (ddl.LossScale(1024.0), None)
    )
    ours.train(4)
    plain.train(4)
    np.testing.assert_allclose(ours.state.gradient_noise, plain.state.gradient_noise, atol=1e-12)


def test_padding_and_skipped_updates_do_not_count():
    x = examples(40)  # the third batch of an epoch holds 8 examples
    trainer = make_trainer(("mirrored", 2, 2), x, 16, shuffle=False)
    trainer.train(2)
    before = trainer.state.gradient_noise.numpy()
    trainer.train(1)
    np.testing.assert_array_equal(trainer.state.gradient_noise, before)
    trainer.train(1)
    assert (trainer.state.gradient_noise.numpy() != before).all()
    skips = make_trainer(
        ("mirrored", 2, 1), x[:16], 16, precision="mixed_float16", loss_scale=ddl.LossScale(2**24)
    )
    skips.train(1)
    assert skips.skipped_updates > 0
    assert np.isfinite(skips.state.gradient_noise).all()
    assert (skips.state.gradient_noise.numpy() != 0).all()


def test_is_saved_and_goes_on(tmp_path):
    x = examples(256)
    straight, first, second = (make_trainer(("mirrored", 2, 1), x, 16) for _ in "abc")
    straight.train(12)
    first.train(5)
    save(tmp_path, first)
    Checkpoints(tmp_path, second).restore_latest()
    second.train(7)
    np.testing.assert_array_equal(second.state.gradient_noise, straight.state.gradient_noise)


def test_needs_parts_to_compare():
    with pytest.raises(ConfigError, match="ACCUMULATION_STEPS to 2 or more"):
        make_trainer(("mirrored", 1, 1), examples(16), 16)


def test_refuses_weights():
    data = {"x": examples(130), "weight": UNEVEN["weight"]}
    with pytest.raises(ConfigError, match="requires equally weighted examples"):
        make_trainer(("mirrored", 2, 1), data, 16)


def test_norms_too_large_to_square_do_not_count():
    trainer = make_trainer(
        ("mirrored", 2, 1),
        examples(16) * 1e16,
        16,
        precision="float32",
        loss_scale=ddl.LossScale(2**24),
    )
    trainer.train(1)
    assert trainer.skipped_updates == 0
    np.testing.assert_array_equal(trainer.state.gradient_noise, 0)


@pytest.mark.parametrize("decay", [-0.1, 1.0])
def test_refuses_a_decay_out_of_range(decay):
    with pytest.raises(ConfigError, match=f"GradientNoiseScale.decay must be .* got {decay}"):
        ddl.GradientNoiseScale(decay)
