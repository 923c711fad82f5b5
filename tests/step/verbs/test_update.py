"""Steps of one's own, as one device that holds the global batch would make them."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.precision import set_precision
from tests.conftest import make_strategy
from tests.step.verbs.own_steps import (
    build,
    copies,
    cross_entropy,
    data,
    overflowing,
)

STEPS = 6

pytestmark = pytest.mark.usefixtures("rows_checked_on_one_device")


# tests/contract/test_own_steps.py compares the other steps with plain loops, without draws.
def test_the_same_on_two_replicas_with_two_microbatches():
    """Weights, slots, targets, own variables, draws and figures, with a padded batch."""
    name = "Critic"
    one = build(name, make_strategy("one_device", 1), clip_norm=0.5)
    figures, values = one.train(STEPS), [of_all[0] for of_all in copies(one)]
    strategy = make_strategy("mirrored", 2)
    trainer = build(name, strategy, clip_norm=0.5, accumulation_steps=2)
    ours = trainer.train(STEPS)
    assert ours == pytest.approx(figures, abs=1e-10)
    for all_copies, value in zip(copies(trainer), values, strict=True):
        for copy in all_copies:
            np.testing.assert_allclose(copy, value, rtol=0, atol=1e-10)


def plain(task):
    task.model = keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(3)]
    )


LOSSES = [
    ("Sam", "per_example", True),
    ("Critic", "fools", False),
]


@pytest.mark.parametrize(("name", "loss", "averaged"), LOSSES)
def test_an_overflow_on_one_replica_changes_nothing_anywhere(name, loss, averaged):
    """Not even what an earlier verb of the same step has changed before."""
    batch, replica = 2, 1  # Critic generates in even batches
    trainer = build(
        name,
        make_strategy("mirrored", 2),
        precision="mixed_float16",
        examples=48,
        change=overflowing(loss, replica, batch),
        loss_scale=ddl.LossScale(1024.0),
        weight_average=ddl.ExponentialMovingAverage(0.9) if averaged else None,
        max_skipped_updates=1,
        clip_norm=0.5,
    )
    trainer.train(2)
    before = copies(trainer)
    state = trainer._runner.loop.run(trainer.state, 3)
    assert (int(state.step), int(state.skipped_in_a_row)) == (2, 1)
    for ours, theirs in zip(copies(trainer), before, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert not state.sums.numpy().any()  # figures are of the updates that were made
    assert not state.gradient_norms.numpy().any()
    trainer.state = state._replace(skipped_in_a_row=tf.zeros([], tf.int64))
    trainer.train(1)
    assert trainer.loss_scale == 512
    for one, other in copies(trainer):
        assert np.isfinite(one).all()
        np.testing.assert_array_equal(one, other)
    assert any((a != b).any() for a, b in zip(map(np.array, copies(trainer)), before, strict=True))


def test_figures_of_several_losses_and_optimizers():
    trainer = build("Gan", make_strategy("one_device", 1), clip_norm=1.0)
    figures = trainer.train(2)
    assert set(figures) == {
        *("loss/real_or_fake", "found", "loss/fools"),
        *("gradient_norm/generator", "gradient_norm/discriminator"),
    }
    assert trainer.metric_names == ("loss/real_or_fake", "found", "loss/fools")
    assert trainer.learning_rates == pytest.approx(
        {"learning_rate/generator": 0.05, "learning_rate/discriminator": 0.02}
    )


def test_a_loss_within_moved_alone_has_a_figure():
    """Or nothing would end a run in which it is not finite."""

    def change(task):
        def step(update, batch):
            gradients = update.gradients(task.real_or_fake, batch, task.discriminator)
            with update.moved(task.discriminator, gradients):
                fools = update.gradients(task.fools, batch, task.generator)
                update.gradients(task.real_or_fake, batch, task.discriminator)
            update.apply(gradients, "discriminator")
            update.when(update.step >= 0, lambda: update.apply(fools, "generator"))

        task.step = step

    trainer = build("Gan", make_strategy("one_device", 1), change=change)
    assert set(trainer.train(1)) == {"loss/real_or_fake", "found", "loss/fools"}


def test_the_loss_of_two_passes_is_that_of_the_first():
    """SAM's second pass is at other weights."""
    trainer = build("Sam", make_strategy("one_device", 1), examples=48, shuffle=False, change=plain)
    task = trainer.task
    rows = {k: v[:16] for k, v in data(48).items()}
    expected = float(tf.reduce_mean(task.per_example(rows, True).loss))
    assert trainer.train(1)["loss"] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("moves", [True, False])
def test_each_pass_moves_statistics_unless_told_otherwise(moves):
    """Two passes at the same weights move them twice, from 0 towards the same mean."""

    def change(task):
        def step(update, batch):
            gradients = update.gradients(task.per_example, batch)
            update.gradients(task.per_example, batch, moves_statistics=moves)
            update.apply(gradients)

        task.step = step

    where = make_strategy("mirrored", 2)
    trainer = build("Sam", where, examples=48, shuffle=False, change=change)
    dense, normalization = trainer.model.layers[:2]
    mean = tf.reduce_mean(dense(data(48)["x"][:16]), axis=0).numpy()
    trainer.train(1)
    share = 1 - normalization.momentum ** (2 if moves else 1)
    for copy in where.experimental_local_results(normalization.moving_mean.value):
        np.testing.assert_allclose(copy.numpy(), share * mean, rtol=1e-9)


class Draws:
    """Keeps what its passes draw in a variable."""

    def __init__(self, step):
        self.model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
        self.drawn = tf.Variable(tf.zeros([4], tf.float64), trainable=False)
        self.own_step = step

    def noise(self, features, training):
        drawn = ddl.random.uniform(self, (features["x"].shape[0], 1))
        return tf.cast(drawn[:, 0], features["x"].dtype)

    def per_example(self, features, training):
        noise = self.noise(features, training)
        return ddl.PerExample(self.model(features["x"])[:, 0] * noise)

    def step(self, update, batch):
        self.own_step(self, update, batch)


def drawn(step, steps=1):
    """The norms that a step keeps; of these draws, since the gradient is linear in them."""
    set_precision("float64")
    with make_strategy("mirrored", 2).scope():
        keras.utils.set_random_seed(0)
        trainer = ddl.Trainer(
            Draws(step), keras.optimizers.SGD(0.0), data(48), global_batch_size=16
        )
    trainer.train(steps)
    return trainer.task.drawn.numpy().tolist()


def keep(task, place, gradients):
    note(task, place, gradients.norm())


def note(task, place, value):
    task.drawn.assign(tf.tensor_scatter_nd_update(task.drawn, [[place]], [value]))


def test_each_pass_draws_anew_unless_told_to_draw_the_same():
    def step(task, update, batch):
        one = update.gradients(task.per_example, batch)
        keep(task, 0, one)
        keep(task, 1, update.gradients(task.per_example, batch))
        keep(task, 2, update.gradients(task.per_example, batch, same_draws_as=one))
        update.apply(one)

    one, other, again, _ = drawn(step)
    assert one == again != other


def test_moved_restores_the_bits_and_average_follows_its_rule():
    """Adding and subtracting would round."""

    class Moves:
        def __init__(self):
            self.model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
            self.slow = keras.models.clone_model(self.model)

        def per_example(self, features, training):
            return ddl.PerExample(cross_entropy(*[self.model(features["x"])[:, 0]] * 2))

        def step(self, update, batch):
            gradients = update.gradients(self.per_example, batch)
            with update.moved(self.model, gradients * 1e9):
                update.gradients(self.per_example, batch)
            update.apply(gradients)
            update.average(self.slow, of=self.model, decay=0.75)

    set_precision("float32")
    values = {"x": data(48)["x"].astype("f4")}
    with make_strategy("mirrored", 2).scope():
        task = Moves()
        trainer = ddl.Trainer(task, keras.optimizers.SGD(0.0), values, global_batch_size=16)
    before = [v.numpy() for v in task.model.variables]
    slow = [v.numpy() for v in task.slow.variables]
    trainer.train(1)
    for variable, was in zip(task.model.variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), was)
    for variable, was, weight in zip(task.slow.variables, slow, before, strict=True):
        np.testing.assert_allclose(variable.numpy(), 0.75 * was + 0.25 * weight, rtol=1e-6)


@pytest.mark.parametrize("kind", ["trained in a branch", "statistics"])
def test_a_skipped_update_restores_what_the_step_assigns(kind):
    """And the average of the weights is that of the weights after the whole step."""

    def change(task):
        own_step = task.step

        def assign():
            model = task.frozen if kind == "frozen" else task.model
            of = model.non_trainable_variables if kind == "statistics" else model.weights
            for variable in of:
                if tf.as_dtype(variable.dtype).is_floating:
                    variable.assign(variable.value + 1.0)

        def step(update, batch):
            own_step(update, batch)
            if kind == "trained in a branch":
                update.when(update.step >= 0, assign)
            else:
                assign()

        task.step = step
        task.frozen = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
        task.frozen.trainable = False

    trainer = build(
        "Sam",
        make_strategy("mirrored", 2),
        precision="mixed_float16",
        examples=48,
        change=lambda task: (overflowing("per_example", 1, 0)(task), change(task)),
        loss_scale=ddl.LossScale(8.0),
        max_skipped_updates=1,
        weight_average=ddl.ExponentialMovingAverage(0.0, warm_up=False),
    )
    before = copies(trainer)
    trainer.trace()
    state = trainer._runner.loop.run(trainer.state, 1)
    assert int(state.step) == 0
    for ours, theirs in zip(copies(trainer), before, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    trainer.state = state._replace(skipped_in_a_row=tf.zeros([], tf.int64))
    trainer.train(1)
    update = trainer._update
    weights = [
        *(v.value for v in update.plan.trained),
        *(v for v in update.plan.statistics if v.dtype.is_floating),
    ]
    for average, weight in zip(update.averages.variables, weights, strict=True):
        np.testing.assert_allclose(average.numpy(), weight.numpy(), rtol=1e-6)


@pytest.mark.parametrize("varies", [False, True])
def test_an_average_at_decay_0_is_a_copy(varies):
    """And equal infinite weights, such as of a mask, stay as they are."""

    def change(task):
        own_step = task.step
        task.target = tf.Variable([1e9, 1e9, np.inf], trainable=False, dtype=tf.float32)
        task.source = tf.Variable([-0.66, 3.0, np.inf], trainable=False, dtype=tf.float32)
        task.slow = tf.Variable([2.0, np.inf, -np.inf], trainable=False, dtype=tf.float32)
        task.fast = tf.Variable([4.0, np.inf, -np.inf], trainable=False, dtype=tf.float32)

        def step(update, batch):
            own_step(update, batch)
            zero = tf.cast(update.step, tf.float32) if varies else 0
            update.average([task.target], of=[task.source], decay=zero)
            update.average([task.slow], of=[task.fast], decay=zero + 0.5)

        task.step = step

    trainer = build("Sam", make_strategy("mirrored", 2), precision="float32", change=change)
    trainer.train(1)
    np.testing.assert_array_equal(trainer.task.target.numpy(), trainer.task.source.numpy())
    np.testing.assert_array_equal(trainer.task.slow.numpy(), [3.0, np.inf, -np.inf])


def test_a_step_without_a_loss_scale_neither_checks_nor_copies():
    def operations(precision, **arguments):
        trainer = build("Gan", make_strategy("one_device", 1), precision=precision, **arguments)
        loop = trainer._runner.loop
        loop.trace(trainer.state)
        graph = loop._graph.as_graph_def()
        nodes = [n for function in graph.library.function for n in function.node_def]
        return [node.op for node in nodes]

    plain_ops = operations("float32")
    assert not [op for op in plain_ops if op in ("IsFinite", "If", "StatelessIf")][1:]
    scaled = operations("mixed_float16", loss_scale=ddl.LossScale())
    assert [op for op in scaled if op == "If"]
