"""Steps of one's own beyond tests/contract/test_own_steps.py: draws, overflows, groups, figures."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.precision import set_precision
from tests.conftest import make_strategy
from tests.contract import step_tasks
from tests.step.verbs.own_steps import Grouped, Sam, build, copies, data, momentum
from tests.training.overflowing import overflowing

STEPS = 6


def test_groups_are_what_a_loop_without_ddl_computes():
    """Two rates and decays, under one limit of the norm."""
    where = make_strategy("mirrored", 2)
    trainer = build(Grouped, where, examples=48, shuffle=False, clip_norm=0.2)
    keras.utils.set_random_seed(7)
    task = Grouped()
    backbone = task.model.layers[0].trainable_variables
    head = task.model.layers[-1].trainable_variables
    optimizers = [momentum(0.05, 0.3), momentum(0.02, 0.1)]
    norms = []
    for step in range(STEPS):
        rows = {k: v[16 * (step % 3) :][:16] for k, v in data(48).items()}
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(task.per_example(rows, True).loss) + sum(task.model.losses)
        own, others = tape.gradient(loss, (backbone, head))
        norm = tf.linalg.global_norm([*own, *others])
        norms.append(float(norm))
        factor = tf.minimum(1.0, 0.2 / norm)
        optimizers[0].apply([g * factor for g in own], backbone)
        optimizers[1].apply([g * factor for g in others], head)
    assert max(norms) > 0.2
    assert trainer.train(STEPS)["gradient_norm"] == pytest.approx(np.mean(norms), rel=1e-9)
    for one, other in zip(trainer.model.variables, task.model.variables, strict=True):
        np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=0, atol=1e-12)


def add_one(variables):
    for variable in variables:
        if tf.as_dtype(variable.dtype).is_floating:
            variable.assign(variable.value + 1.0)


def test_a_skipped_update_restores_what_the_step_assigns():
    """Statistics; and in a branch also weights. The average is that after the whole step."""

    def change(task):
        own_step, model = task.step, task.model
        overflowing(task, lambda batch: tf.where(batch == 0, 1, -1))

        def step(update, batch):
            own_step(update, batch)
            add_one(model.non_trainable_variables)
            update.when(update.step >= 0, lambda: add_one(model.weights))

        task.step = step

    average = ddl.ExponentialMovingAverage(0.0, warm_up=False)
    options = {"loss_scale": ddl.LossScale(8.0), "max_skipped_updates": 1}
    options |= {"weight_average": average, "clip_norm": 0.5, "examples": 48}
    where = make_strategy("mirrored", 2)
    trainer = build(Sam, where, precision="mixed_float16", change=change, **options)
    before = copies(trainer)
    trainer.trace()
    assert checks_in(trainer).count("IsFinite") > 1
    state = trainer._runner.loop.run(trainer.state, 1)
    assert (int(state.step), int(state.skipped_in_a_row)) == (0, 1)
    for ours, theirs in zip(copies(trainer), before, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    # Figures are of the updates that were made.
    assert not state.sums.numpy().any()
    assert not state.gradient_norms.numpy().any()
    trainer.state = state._replace(skipped_in_a_row=tf.zeros([], tf.int64))
    trainer.train(1)
    update = trainer._train_step
    weights = [*(v.value for v in update.plan.trained), *update.statistics]
    for own, weight in zip(update.averages.variables, weights, strict=True):
        np.testing.assert_allclose(own.numpy(), weight.numpy(), rtol=1e-6)


def checks_in(trainer):
    """Types of the operations of an update that look for an overflow, or depend on it."""
    graph = trainer._runner.loop._concrete(trainer.state).graph.as_graph_def()
    kinds = [node.op for function in graph.library.function for node in function.node_def]
    return [kind for kind in kinds if kind in ("IsFinite", "If", "StatelessIf")]


def test_a_loss_within_moved_alone_has_a_figure():
    """Or nothing would end a run in which it is not finite. Without a loss scale, one look at the
    sums of losses is all that asks for it.
    """

    def change(task):
        def step(update, batch):
            up = update.gradients(task.per_example, batch, name="up")
            with update.moved(task.model, up):
                sharp = update.gradients(task.per_example, batch, name="sharp")
            update.apply(sharp)

        task.step = step

    trainer = build(Sam, make_strategy("one_device", 1), change=change)
    assert set(trainer.train(1)) == {"loss/up", "loss/sharp"}
    assert checks_in(trainer) == ["IsFinite"]


class Kept(step_tasks.OneModel):
    """Keeps what its step and its passes draw, and averages."""

    def __init__(self):
        super().__init__()
        self.slow = keras.models.clone_model(self.model)
        self.kept = tf.Variable(tf.zeros([8], tf.float64), trainable=False)
        self.target = tf.Variable([1e9, 2.0, np.inf], dtype=tf.float32, trainable=False)
        self.source = tf.Variable([-0.66, 4.0, np.inf], dtype=tf.float32, trainable=False)

    def noisy(self, features, training):
        drawn = ddl.random.uniform(self, (features["x"].shape[0], 1))[:, 0]
        return ddl.PerExample(self.model(features["x"])[:, 0] * tf.cast(drawn, tf.float64))

    def draw(self, gradient, variable):
        drawn = ddl.random.normal(self, (gradient.shape.num_elements(),))
        return tf.reshape(tf.cast(drawn, gradient.dtype), gradient.shape)

    def keep(self, place, value):
        value = tf.cast(value, tf.float64)
        self.kept.assign(tf.tensor_scatter_nd_update(self.kept, [[place]], [value]))

    def step(self, update, batch):
        one = update.gradients(self.noisy, batch)
        with update.moved(self.model, one * 1e9):
            pass
        self.keep(0, one.norm())
        self.keep(1, update.gradients(self.noisy, batch).norm())
        self.keep(2, one.map(self.draw).norm())
        self.keep(3, one.map(self.draw).norm())
        self.keep(4, ddl.random.normal(self, (1,))[0])
        draw = lambda: self.keep(5, ddl.random.normal(self, (1,))[0])  # noqa: E731
        update.when(update.step >= 0, draw)
        self.keep(6, update.gradients(self.noisy, batch, same_draws_as=one).norm())
        update.apply(one)
        update.average([self.slow], of=[self.model], decay=0.75)
        update.average([self.target], of=[self.source], decay=tf.cast(0 * update.step, tf.float32))


def test_draws_moved_and_averages_on_one_and_two_replicas():
    """Draws differ, but on all replicas they agree; `moved` restores bits, decay 0 copies them."""
    found = []
    for where in (("one_device", 1), ("mirrored", 2)):
        set_precision("float64")
        strategy = make_strategy(*where)
        keras.utils.set_random_seed(0)
        with strategy.scope():
            task, still = Kept(), keras.optimizers.SGD(0.0)
        rows = {"global_batch_size": 8, "strategy": strategy, "shuffle": False}
        trainer = ddl.Trainer(task, still, step_tasks.examples(), **rows)
        before = task.model.get_weights()
        trainer.train(1)
        for ours, theirs in zip(task.model.get_weights(), before, strict=True):
            np.testing.assert_array_equal(ours, theirs)
        kept = [copy.numpy() for copy in strategy.experimental_local_results(task.kept)]
        for own in kept[1:]:
            np.testing.assert_array_equal(own, kept[0])
        found += kept[:1]
        np.testing.assert_array_equal(task.target.numpy(), task.source.numpy())
    np.testing.assert_allclose(*found, rtol=1e-12)
    assert len(np.unique(found[0][:6])) == 6
    assert found[0][6] == found[0][0]


def test_several_sources_resume_to_the_bit(tmp_path):
    def trainer():
        set_precision("float64")
        keras.utils.set_random_seed(7)
        task, sizes = step_tasks.PcGrad(), step_tasks.PcGrad.sizes
        return ddl.Trainer(task, momentum(0.1), task.data(), global_batch_size=sizes)

    straight = trainer()
    straight.train(3)
    checkpoints = ddl.Checkpoints(tmp_path, straight)
    checkpoints.save()
    checkpoints.wait()
    straight.train(3)
    resumed = trainer()
    ddl.Checkpoints(tmp_path, resumed).restore_latest()
    resumed.train(3)
    for (ours, *_), (theirs, *_) in zip(copies(resumed), copies(straight), strict=True):
        np.testing.assert_array_equal(ours, theirs)
