"""The gradient noise scale of steps of one's own, one for each optimizer."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.checkpoints.checkpoints import Checkpoints
from ddl.errors import ConfigError
from ddl.precision import set_precision
from tests.conftest import make_strategy, save
from tests.step.test_noise_scale import FEATURES, TOGETHER, Distance, estimates, examples
from tests.step.verbs.own_steps import Gan, build, copies, data, overflowing, two_optimizers

pytestmark = pytest.mark.usefixtures("rows_checked_on_one_device")
SCALE = ddl.GradientNoiseScale(0.75)


class Distances:
    """Two losses of known gradients: w - x, in the turns of a repeat, and v - 3x."""

    def __init__(self):
        self.near, self.far = Distance(), Distance()

    def of_near(self, features, training):
        return self.near.per_example(features, training)

    def of_far(self, features, training):
        return self.far.per_example({"x": 3 * features["x"]}, training)

    def step(self, update, batch):
        update.repeat(2, lambda turn: self.minimize_near(update, batch))
        far = update.gradients(self.of_far, batch, self.far.model)
        update.when(update.step % 2 == 1, lambda: update.apply(far * 0.5, optimizer="far"))

    def minimize_near(self, update, batch):
        update.minimize(self.of_near, batch, self.near.model, optimizer="near")


def distances(place, x, **arguments):
    set_precision("float64")
    strategy = make_strategy(*place[:2])
    with strategy.scope():
        return ddl.Trainer(
            Distances(),
            {name: keras.optimizers.SGD(1e-30) for name in ("near", "far")},
            {"x": x},
            global_batch_size=16,
            accumulation_steps=place[2],
            gradient_noise_scale=SCALE,
            shuffle=False,
            **arguments,
        )


@pytest.mark.parametrize("place", TOGETHER[:2], ids=str)
def test_each_optimizer_has_the_estimate_of_its_own_gradients(place):
    """Only gradients that are applied count; their multiples have the same noise scale."""
    x = examples(64)
    trainer = distances(place, x)
    near, far = np.zeros(2), np.zeros(2)
    both = zip(estimates(x, 16, 4), estimates(3 * x, 16, 4), strict=True)
    for step, (of_near, of_far) in enumerate(both):
        figures = trainer.train(1)
        for _ in range(2):
            near = 0.75 * near + 0.25 * of_near
        if step % 2:
            far = 0.75 * far + 0.25 * of_far
        np.testing.assert_allclose(
            trainer.state.gradient_noise, [*near, *far], rtol=0, atol=1e-12 * FEATURES
        )
        of_names = {"near": near, "far": far}.items()
        expected = {n: average[1] / average[0] for n, average in of_names if (average > 0).all()}
        found = {n.split("/")[1]: value for n, value in figures.items() if "noise_scale" in n}
        assert found == pytest.approx(expected, rel=1e-9)
    assert found


def critic(*place, **arguments):
    """A repeat, a branch, dropout, and a padded batch."""
    return build("Critic", make_strategy(*place), gradient_noise_scale=SCALE, **arguments)


def test_the_same_on_any_devices_and_resumed_to_the_bit(tmp_path):
    alone, straight, first, resumed = (
        critic(*place, accumulation_steps=parts)
        for *place, parts in [("one_device", 1, 4), *[("mirrored", 2, 2)] * 3]
    )
    for trainer in (alone, straight):
        trainer.train(7)
    noise = alone.state.gradient_noise.numpy()
    assert noise.shape == (4,)
    assert (noise != 0).all()
    np.testing.assert_allclose(straight.state.gradient_noise, noise, rtol=0, atol=1e-10)
    first.train(4)
    save(tmp_path, first)
    Checkpoints(tmp_path, resumed).restore_latest()
    resumed.train(3)
    np.testing.assert_array_equal(resumed.state.gradient_noise, straight.state.gradient_noise)
    for ours, theirs in zip(copies(resumed), copies(straight), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_skipped_update_counts_for_no_optimizer():
    """Also not for the one whose gradient was finite."""
    trainer = critic(
        *("mirrored", 2),
        precision="mixed_float16",
        examples=48,
        change=overflowing("fools", 1, 2),
        loss_scale=ddl.LossScale(1024.0),
        max_skipped_updates=1,
    )
    trainer.train(2)
    before = trainer.state.gradient_noise.numpy()
    assert (before != 0).all()
    state = trainer._runner.loop.run(trainer.state, 3)
    assert int(state.skipped_in_a_row) == 1
    np.testing.assert_array_equal(state.gradient_noise, before)


class Combining(Gan):
    """Applies something else than the gradients of one loss with the generator's optimizer."""

    def __init__(self, way):
        super().__init__()
        self.way = way

    def weighed(self, features, training):
        loss = self.fools(features, training).loss
        return ddl.PerExample(loss, weight=tf.cast(features["label"] > 0, loss.dtype))

    def otherwise(self, features, training):
        return self.fools(features, training)

    def step(self, update, batch):
        update.minimize(self.real_or_fake, batch, self.discriminator, optimizer="discriminator")
        if self.way == "weighed":
            update.minimize(self.weighed, batch, self.generator, optimizer="generator")
            return
        one, other = (
            update.gradients(loss, batch, self.generator) for loss in (self.fools, self.otherwise)
        )
        if self.way == "both":
            update.apply(one, optimizer="generator")
            update.apply(other, optimizer="generator")
            return
        first, second = self.generator.layers[0], self.generator.layers[-1]
        combined = {
            "sum": lambda: one + other,
            "difference": lambda: one - other,
            "map": lambda: one.map(lambda gradient, variable: gradient * 2),
            "joined": lambda: one.of(first).and_of(other.of(second)),
        }[self.way]()
        update.apply(combined, optimizer="generator")


@pytest.mark.parametrize(
    ("way", "message"),
    [
        *(
            (way, "applies with the optimizer 'generator' gradients that it has combined: a sum")
            for way in ("sum", "difference", "map", "joined")
        ),
        ("both", "with the optimizer 'generator' the gradients of the losses fools, otherwise. R"),
        ("weighed", "requires equally weighted examples"),
    ],
)
def test_gradients_of_no_single_loss_are_refused(way, message):
    set_precision("float64")
    strategy = make_strategy("mirrored", 2)
    with strategy.scope(), pytest.raises(ConfigError, match=message):
        ddl.Trainer(
            Combining(way),
            two_optimizers(),
            data(48),
            global_batch_size=16,
            gradient_noise_scale=SCALE,
        )
