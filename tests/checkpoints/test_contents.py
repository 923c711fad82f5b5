"""What checkpoints hold, for models in every style: whatever is lost shows in figures and bits."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.checkpoints.checkpoints import Checkpoints
from ddl.checkpoints.export import export_model
from ddl.errors import ConfigError, ModelDirectoryError
from ddl.tasks.parts import layers_of
from tests.checkpoints.model_styles import MODELS, STYLES, Attributes, Containers, task
from tests.conftest import make_strategy, save
from tests.run.test_train import DIGITS_MLP, run
from tests.training.test_trainer import DATA, IMAGES

# Of frozen weights and preprocessing too: what differs by the seed must come from the checkpoint.
_STYLES = [("Containers", 2), ("sequential", 1), ("own_layers", 1)]


def trainer_of(make_task, seed, replicas=1):
    keras.utils.set_random_seed(seed)
    strategy = make_strategy("mirrored" if replicas > 1 else "one_device", replicas)
    with strategy.scope():
        optimizer = keras.optimizers.SGD(0.001, momentum=0.9)
        return ddl.Trainer(
            make_task(), optimizer, DATA, global_batch_size=32, eval_data=DATA, strategy=strategy
        )


def variables(trainer):
    layers = [v for layer in layers_of(trainer.task) for v in layer.variables]
    all_of_them = [*trainer.model.variables, *layers, *trainer.optimizer.variables]
    # Those of seed generators stay as they are: no draw of a trainer reads them.
    return [np.asarray(v) for v in all_of_them if "seed_generator" not in v.path]


def assert_equal(values, expected):
    for value, reference in zip(values, expected, strict=True):
        np.testing.assert_array_equal(value, reference)


def assert_same(one, other):
    assert_equal(variables(one), variables(other))


def spoil(trainer):
    """Changes every variable of the traced loop, so that a variable that is not restored shows."""
    for variable in trainer.variables_in_use:
        if variable.dtype.is_floating or variable.dtype.is_integer:
            variable.assign(variable + tf.ones([], variable.dtype))


@pytest.mark.parametrize(("style", "replicas"), _STYLES)
def test_every_style_resumes_evaluates_and_exports_what_was_trained(tmp_path, style, replicas):
    def make_task():
        return task(style)

    straight = trainer_of(make_task, 1, replicas)
    straight.train(3)
    save(tmp_path, straight)
    saved = variables(straight)
    figures = straight.evaluate()
    straight.train(3)
    trained, trained_figures = variables(straight), straight.evaluate()

    # The same trainer resumes, because a second one would be traced again.
    spoil(straight)
    Checkpoints(tmp_path, straight).restore_latest()
    assert straight.evaluate() == figures
    straight.train(3)
    assert_equal(variables(straight), trained)
    assert straight.evaluate() == trained_figures

    # A trainer of another seed takes over everything that was saved.
    other = trainer_of(make_task, 2, replicas)
    Checkpoints(tmp_path, other).restore_model()
    of_model = len(saved) - len(other.optimizer.variables)
    weights, expected = (
        # Those of generators are integers, and stay as they are.
        [value for value in values[:of_model] if value.dtype.kind == "f"]
        for values in (variables(other), saved)
    )
    assert_equal(weights, expected)
    assert other.evaluate() == figures
    with other.evaluation_weights():
        exported, _ = export_model(other.model, tmp_path / "export")
        expected = other.model(IMAGES[:7]).numpy()
    loaded = keras.models.load_model(exported)
    np.testing.assert_allclose(loaded(IMAGES[:7]).numpy(), expected, rtol=0, atol=1e-6)
    Checkpoints(tmp_path, other).restore_latest()
    assert_equal(variables(other), saved)
    if replicas > 1:
        other.train(3)
        assert_equal(variables(other), trained)


def test_names_do_not_depend_on_what_was_built_before(tmp_path):
    names = []
    for _ in range(2):
        path = save(tmp_path, trainer_of(lambda: task("Containers"), 1))
        names.append(set(tf.train.load_checkpoint(path).get_variable_to_shape_map()))
    assert names[0] == names[1]
    assert "in_containers/blocks/1/0/moving_mean/.ATTRIBUTES/VARIABLE_VALUE" in names[0]


def test_tensorflow_still_leaves_out_what_keras_keeps_in_lists():
    """Else `ddl.checkpoints.contents` can name less."""
    model = Containers()
    model(tf.zeros([1, 6, 6, 1]))
    checkpoint = tf.train.Checkpoint(model=model)
    below = tf.train.TrackableView(checkpoint).descendants()
    assert not any(isinstance(item, keras.Variable) for item in below)


class KeepsInASet(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden = {keras.layers.Dense(2)}

    def call(self, images, training=False):
        (layer,) = self.hidden
        return layer(tf.reshape(images, [-1, 36]))


def test_what_has_no_lasting_name_is_refused(tmp_path):
    trainer = trainer_of(lambda: ddl.Classification(built(KeepsInASet())), 1)
    with pytest.raises(ConfigError, match=r"cannot hold .*dense.*/kernel.* a set has no order"):
        Checkpoints(tmp_path, trainer)


class TwoKeys(Attributes):
    def __init__(self):
        super().__init__()
        self.gains = {key: self.add_weight(shape=(), initializer="ones") for key in (1, "1")}

    def call(self, images, training=False):
        return super().call(images, training) * self.gains[1] * self.gains["1"]


def test_keys_that_read_alike_are_refused(tmp_path):
    trainer = trainer_of(lambda: ddl.Classification(built(TwoKeys())), 1)
    with pytest.raises(ConfigError, match=r"Two variables of TwoKeys .*'gains/1'"):
        Checkpoints(tmp_path, trainer)


def built(model):
    model(tf.zeros([1, 6, 6, 1]))
    return model


class ReadsElsewhere(ddl.Classification):
    """Only reads the variable; a loss that writes it is refused before training."""

    def per_example(self, features, training):
        output = super().per_example(features, training)
        return output._replace(loss=output.loss * factor()) if training else output


_FACTOR = []


def factor():
    if not _FACTOR:
        _FACTOR.append(tf.Variable(1.0, trainable=False, name="elsewhere"))
    return _FACTOR[0]


def test_a_variable_that_belongs_to_nobody_is_refused(tmp_path):
    factor()
    trainer = trainer_of(lambda: ReadsElsewhere(built(Attributes())), 1)
    trainer.train(1)
    with pytest.raises(ConfigError, match="uses the variables elsewhere, but neither the model"):
        save(tmp_path, trainer)
    assert not list(tmp_path.iterdir())


def test_draws_of_keras_without_a_seed_resume(tmp_path):
    """In training and, as of a task that samples its outputs, in an evaluation."""

    class Noisy(Attributes):
        def call(self, images, training=False):
            noise = keras.random.normal((1, 6, 6, 1))
            return super().call(tf.cast(images, tf.float32) + noise, training)

    def make_task():
        return ddl.Classification(built(Noisy()))

    straight = trainer_of(make_task, 1, 2)
    straight.train(1)
    save(tmp_path, straight)
    resumed = trainer_of(make_task, 2, 2)
    Checkpoints(tmp_path, resumed).restore_latest()
    for trainer in (straight, resumed):
        trainer.train(2)
    assert_same(resumed, straight)
    figures = straight.evaluate()
    assert resumed.evaluate() == straight.evaluate() == figures
    resumed.train(1)  # to this, too, the draws of an evaluation do nothing
    straight.train(1)
    assert_same(resumed, straight)


class HeadOfItsOwn(ddl.Classification):
    """Its head is no part of the model, and nobody updates it."""

    def __init__(self, model, trainable=True):
        super().__init__(model)
        self.heads = [keras.layers.Dense(2, trainable=trainable)]
        self.heads[0].build((None, 2))

    def per_example(self, features, training):
        logits = self.heads[0](self.model(features["image"], training=training))
        losses = keras.ops.sparse_categorical_crossentropy(features["label"], logits, True)
        return ddl.PerExample(loss=losses)


def test_trainable_variables_outside_of_the_model_are_refused():
    trainer = trainer_of(lambda: HeadOfItsOwn(built(Attributes())), 1)
    with pytest.raises(ConfigError, match=r"depends on the trainable variables dense\S*/kernel"):
        trainer.train(1)
    trainer = trainer_of(lambda: HeadOfItsOwn(built(Attributes()), False), 1)
    trainer.train(1)


def saved_without_containers(folder, trainer):
    """As ddl once saved: without what the model keeps in lists and dicts."""
    checkpoints = Checkpoints(folder, trainer)
    parts = {"model": trainer.model, "optimizer": trainer.optimizer}
    checkpoints._checkpoint = tf.train.Checkpoint(
        **parts,
        state=checkpoints._state._asdict(),
    )
    checkpoints.save()
    checkpoints.finish()


@pytest.mark.parametrize("style", ["Containers", "functional"])
def test_checkpoints_from_before_load_or_are_refused(tmp_path, style):
    trainer = trainer_of(lambda: task(style), 1)
    saved_without_containers(tmp_path, trainer)
    other = trainer_of(lambda: task(style), 2)
    before = variables(other)
    for restore in ("restore_latest", "restore_model"):
        if style == "functional":
            getattr(Checkpoints(tmp_path, other), restore)()
            np.testing.assert_array_equal(variables(other)[0], variables(trainer)[0])
            continue
        with pytest.raises(
            ModelDirectoryError, match="left the variables in lists and dicts out of .* Train again"
        ):
            getattr(Checkpoints(tmp_path, other), restore)()
        for value, reference in zip(variables(other), before, strict=True):
            np.testing.assert_array_equal(value, reference)


def test_a_checkpoint_that_holds_more_is_refused(tmp_path):
    """Before anything is assigned, and with the names."""
    save(tmp_path, trainer_of(lambda: ddl.Classification(deep(2)), 1))
    other = trainer_of(lambda: ddl.Classification(deep(1)), 2)
    before = variables(other)
    for restore in ("restore_latest", "restore_model"):
        with pytest.raises(ModelDirectoryError, match=r"it has, but this run lacks,.*last/"):
            getattr(Checkpoints(tmp_path, other), restore)()
        for value, reference in zip(variables(other), before, strict=True):
            np.testing.assert_array_equal(value, reference)


def deep(layers):
    names = ["first", "last"][:layers]
    stack = [keras.layers.Dense(2, name=name) for name in names]
    return keras.Sequential([keras.Input((6, 6, 1)), keras.layers.Flatten(), *stack])


def test_any_folder_name_can_be_read_again(tmp_path):
    trainer, other, third = (trainer_of(lambda: ddl.Classification(deep(2)), n) for n in (1, 2, 3))
    for folder in ("lr[0.1]", "a*b", "what?", "back\\slash", "{x,y}", "~ ü ' \""):
        for variable in trainer.model.variables:  # else the last folder's values would do
            variable.assign(variable + 1.0)
        save(tmp_path / folder, trainer)
        assert Checkpoints(tmp_path / folder, other).restore_latest()
        assert_same(other, trainer)
        Checkpoints(tmp_path / folder, other).restore_model()
        ddl.WarmStart(str(tmp_path / folder)).apply(third.model)
        np.testing.assert_array_equal(variables(third)[0], variables(trainer)[0])


def test_a_run_in_a_folder_as_sweeps_name_them(tmp_path, capsys):
    model_dir = tmp_path / "lr[0.1]"
    run(model_dir, "TRAIN_STEPS = 20", **DIGITS_MLP)
    for mode in ("train_and_eval", "eval", "export"):
        run(model_dir, **DIGITS_MLP, mode=mode)
        assert f"Restored step {20 if mode == 'train_and_eval' else 40}" in capsys.readouterr().out
    keras.models.load_model(model_dir / "export" / "model.keras")


def test_all_styles_are_here():
    assert set(MODELS) < set(STYLES)


class KeepsAMetric(Attributes):
    def __init__(self):
        super().__init__()
        self.seen = keras.metrics.Mean()

    def call(self, images, training=False):
        output = super().call(images, training)
        if training:
            self.seen.update_state(output)
        return output


def test_metrics_on_attributes_are_saved(tmp_path):
    def make():
        return ddl.Classification(built(KeepsAMetric()))

    trainer = trainer_of(make, 1)
    trainer.train(2)
    save(tmp_path, trainer)
    other = trainer_of(make, 2)
    Checkpoints(tmp_path, other).restore_latest()
    assert trainer.train(2) == other.train(2)


def test_an_optimizer_with_other_variables_is_refused_before_anything_is_assigned(tmp_path):
    """A schedule in place of a number moves all slots in Keras's list by one."""

    def trainer(rate):
        keras.utils.set_random_seed(1)
        task, optimizer = ddl.Classification(deep(2)), keras.optimizers.Adam(rate)
        return ddl.Trainer(task, optimizer, DATA, global_batch_size=32)

    first = trainer(0.1)
    first.train(2)
    save(tmp_path, first)
    other = trainer(keras.optimizers.schedules.CosineDecay(0.1, 10))
    before = variables(other)
    with pytest.raises(ModelDirectoryError, match="cannot be restored"):
        Checkpoints(tmp_path, other).restore_latest()
    for value, reference in zip(variables(other), before, strict=True):
        np.testing.assert_array_equal(value, reference)
