"""Misuse of a step of one's own: refused before training, with the remedy."""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.distribution.traits import traits_of
from ddl.errors import ConfigError
from ddl.optimizers.plateau import ReduceOnPlateau, plateaus_of
from ddl.precision import set_precision
from ddl.training import assembly
from tests.conftest import make_strategy
from tests.step.verbs.own_steps import build, data, perceptron, two_optimizers


@pytest.fixture(scope="module", autouse=True)
def _rows_checked_once():
    """Checks in each test: the tasks differ in a function alone."""


class Task:
    """A task whose step is given."""

    def __init__(self, step, **attributes):
        self.model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
        self.own_step = step
        vars(self).update(attributes)

    def per_example(self, features, training):
        logits = self.model(features["x"], training=training)
        loss = tf.nn.sparse_softmax_cross_entropy_with_logits(features["label"], logits)
        return ddl.PerExample(loss)

    def step(self, update, batch):
        self.own_step(self, update, batch)


def trainer(step, optimizer=None, strategy=None, make=Task, **arguments):
    set_precision("float64")
    strategy = strategy or make_strategy("mirrored", 2)
    with strategy.scope():
        task = make(step)
        optimizer = optimizer or keras.optimizers.SGD(0.1)
        return ddl.Trainer(
            task, optimizer, data(48), global_batch_size=16, strategy=strategy, **arguments
        )


def minimize(task, update, batch):
    update.minimize(task.per_example, batch)


def refused(match, step, **arguments):
    with pytest.raises(ConfigError, match=match):
        trainer(step, **arguments).trace()


def test_a_step_that_applies_nothing():
    refused(
        "applies no gradients, so it trains nothing",
        lambda task, update, batch: update.gradients(task.per_example, batch),
    )


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ("discriminatr", "no optimizer 'discriminatr'.*Did you mean discriminator"),
        (None, "has the optimizers generator, discriminator. Name one of them"),
    ],
)
def test_an_optimizer_that_does_not_exist(given, match):
    with pytest.raises(ConfigError, match=match):
        build(
            "Gan",
            make_strategy("one_device", 1),
            change=lambda task: setattr(
                task,
                "step",
                lambda update, batch: update.minimize(
                    task.fools, batch, task.generator, optimizer=given
                ),
            ),
        )


def test_an_optimizer_without_a_name_where_one_is_given():
    refused(
        "no optimizer 'adam'; the Trainer has only one, without a name",
        lambda task, update, batch: update.minimize(task.per_example, batch, optimizer="adam"),
    )


def test_an_optimizer_that_the_step_never_uses():
    refused(
        "never uses the optimizer 'discriminator'",
        lambda task, update, batch: update.minimize(task.per_example, batch, optimizer="generator"),
        optimizer=two_optimizers(),
    )


def test_several_optimizers_without_a_step():
    class Plain:
        def __init__(self, step):
            self.model = perceptron(6, 3)

        per_example = Task.per_example

    refused("has no `step`", None, make=Plain, optimizer=two_optimizers())


@pytest.mark.parametrize(
    ("optimizers", "match"),
    [
        ({}, "at least one optimizer, got an empty dict"),
        ({"a b": "SGD"}, "must be a word of letters, digits and underscores.*'a b'"),
        ({"optimizer": "SGD", "b": "Adam"}, "underscores other than 'optimizer'"),
        (dict.fromkeys("ab", "one"), "two are the same object.*@generator/Adam"),
    ],
)
def test_a_dict_of_optimizers_that_cannot_be_told_apart(optimizers, match):
    made = {}
    optimizers = {
        name: made.setdefault(which, keras.optimizers.SGD(0.1))
        for name, which in optimizers.items()
    }
    with make_strategy("one_device", 1).scope():
        task = Task(minimize)
    with pytest.raises(ConfigError, match=match):
        ddl.Trainer(task, optimizers, data(48), global_batch_size=16)


def test_a_loss_that_is_a_scalar():
    def scalar(features, training):
        return ddl.PerExample(tf.constant(0.0))

    refused(
        "Task.scalar must return one loss for each example.*got a scalar loss",
        lambda task, update, batch: update.minimize(scalar, batch),
    )


@pytest.mark.parametrize(
    ("loss", "match"),
    [
        (3.0, r"a loss must be a function.*got 3\.0"),
        (lambda features, training: None, "needs a name of letters.*for <function.*<lambda>"),
    ],
)
def test_a_loss_that_is_no_named_function(loss, match):
    refused(match, lambda task, update, batch: update.minimize(loss, batch))


def test_a_mean_of_a_function_without_a_name():
    refused(
        "the function of a mean or sum, needs a name of letters.*for <function.*<lambda>",
        lambda task, update, batch: update.mean(lambda features, training: None, batch),
    )


def test_two_losses_of_one_name():
    def step(task, update, batch):
        def loss(features, training):
            return task.per_example(features, training)

        update.minimize(task.per_example, batch, name="loss")
        update.minimize(loss, batch)

    refused("two losses have the name 'loss'", step)


def test_two_losses_with_a_metric_of_one_name():
    def with_metric(task, name):
        def loss(features, training):
            output = task.per_example(features, training)
            return output._replace(metrics={"accuracy": output.loss})

        loss.__name__ = name
        return loss

    def make(step):
        task = Task(step)
        task.losses = [with_metric(task, "one"), with_metric(task, "two")]
        return task

    def step(task, update, batch):
        for loss in task.losses:
            update.minimize(loss, batch)

    refused("Two losses of a step return the metric 'accuracy'", step, make=make)


def test_features_instead_of_the_batch():
    refused(
        "takes the batch that the step was given",
        lambda task, update, batch: update.minimize(task.per_example, {"x": 1}),
    )


def test_a_feature_read_in_the_step():
    def step(task, update, batch):
        update.minimize(task.per_example, {"x": batch["x"]})

    refused(r"A step cannot read batch\['x'\].* Read the features in a loss", step)


@pytest.mark.parametrize("within", ["step", "branch"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: tf.Variable(0.0),
        lambda: keras.Variable(0.0),
        lambda: keras.layers.Dense(3)(tf.zeros([1, 6])),
        lambda: keras.random.SeedGenerator(1),
    ],
    ids=["tf.Variable", "keras.Variable", "layer", "SeedGenerator"],
)
def test_a_variable_made_in_the_step(make, within):
    def step(task, update, batch):
        minimize(task, update, batch)
        if within == "step":
            make()
        else:
            update.when(update.step > 0, make)

    refused("step must not make variables", step)


def test_a_variable_made_outside_of_the_scope():
    outside = tf.Variable(0.0)
    refused(
        "outside the strategy's scope",
        minimize,
        make=lambda step: Task(step, count=outside),
    )


class Memory:
    def __init__(self):
        self.rows = tf.Variable(tf.zeros([4, 2]), trainable=False)


@pytest.mark.parametrize("within", ["step", "branch"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_an_assigned_variable_that_no_attribute_leads_to(replicas, within):
    strategy = make_strategy("mirrored" if replicas > 1 else "one_device", replicas)

    def step(task, update, batch):
        minimize(task, update, batch)

        def count():
            task.memory.rows.assign_add(tf.ones([4, 2]))

        if within == "step":
            count()
        else:
            update.when(update.step > 0, count)

    refused(
        r"assigns to a variable .*float32 \(4, 2\), to which no attribute of Task leads.*Keep the",
        step,
        strategy=strategy,
        make=lambda step: Task(step, memory=Memory()),
    )


def test_a_step_may_assign_to_a_module_and_to_its_optimizer():
    class Rows(tf.Module):
        def __init__(self):
            self.rows = tf.Variable(tf.zeros([2]), trainable=False)

    strategy = make_strategy("mirrored", 2)
    with strategy.scope():
        optimizer = keras.optimizers.SGD(0.1)

    def step(task, update, batch):
        minimize(task, update, batch)
        task.memory.rows.assign_add(tf.ones([2]))
        optimizer.learning_rate.assign(0.05)

    trained = trainer(step, optimizer, strategy, make=lambda step: Task(step, memory=Rows()))
    trained.train(2)
    np.testing.assert_array_equal(trained.task.memory.rows.numpy(), [2, 2])


def test_a_trainable_layer_that_no_verb_changes():
    refused(
        "changes no variable of .*kernel.*although they are trainable",
        minimize,
        make=lambda step: Task(step, head=perceptron(6, 1)),
    )


def test_a_model_that_no_attribute_leads_to():
    class Nets:
        def __init__(self):
            self.net = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])

    def make(step):
        task = Task(step, nets=Nets())
        task.model.trainable = False
        task.per_example = lambda features, training: ddl.PerExample(
            tf.reduce_sum(task.nets.net(features["x"]) ** 2, axis=1)
        )
        task.per_example.__name__ = "per_example"
        return task

    refused(
        "uses the variables .*kernel.*, but no attribute of Task leads to them",
        lambda task, update, batch: update.minimize(task.per_example, batch, task.nets.net),
        make=make,
    )


def test_a_trainable_variable_of_the_task_that_nothing_updates():
    def make(step):
        task = Task(step, temperature=keras.Variable(2.0))
        per_example = task.per_example

        def scaled(features, training):
            output = per_example(features, training)
            return output._replace(loss=output.loss * tf.cast(task.temperature, "float64"))

        task.scaled = scaled
        return task

    refused(
        "A loss reads the trainable variables .* of the task, but the step does not update them",
        lambda task, update, batch: update.minimize(task.scaled, batch),
        make=make,
    )


def test_a_variable_of_the_task_may_be_trained():
    def make(step):
        task = Task(step, scale=keras.Variable(2.0, dtype="float64"))
        task.scaled = lambda features, training: ddl.PerExample(
            task.per_example(features, training).loss * tf.exp(-task.scale.value) + task.scale
        )
        task.scaled.__name__ = "scaled"
        return task

    trained = trainer(
        lambda task, update, batch: update.minimize(
            task.scaled, batch, [*task.model.trainable_variables, task.scale]
        ),
        make=make,
    )
    trained.train(3)
    assert float(trained.task.scale.value.numpy()) != 2


@pytest.mark.parametrize("arguments", [{}, {"accumulation_steps": 2}], ids=str)
def test_a_loss_may_use_tensors_of_the_step(arguments):
    """Its value in the present update, not one of an earlier trace."""

    def by_loss(task, update, batch):
        norm = update.gradients(task.per_example, batch).norm()
        factor = norm * tf.cast(update.step + 1, norm.dtype)

        def scaled(features, training):
            output = task.per_example(features, training)
            return output._replace(loss=output.loss * factor)

        update.minimize(scaled, batch)

    def by_gradients(task, update, batch):
        gradients = update.gradients(task.per_example, batch)
        norm = gradients.norm()
        update.apply(gradients * (norm * tf.cast(update.step + 1, norm.dtype)))

    trained = []
    for step in (by_loss, by_gradients):
        keras.utils.set_random_seed(0)
        trained.append(trainer(step, **arguments))
        trained[-1].train(3)
    for one, other in zip(*(t.model.variables for t in trained), strict=True):
        np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=0, atol=1e-12)


def test_a_loss_defined_in_the_step():
    def step(task, update, batch):
        def doubled(features, training):
            output = task.per_example(features, training)
            return output._replace(loss=2 * output.loss)

        update.minimize(doubled, batch)
        update.minimize(task.per_example, batch)

    assert set(trainer(step).train(2)) == {"loss/doubled", "loss/per_example"}


@pytest.mark.parametrize("verb", ["apply", "add", "draws"])
def test_gradients_that_leave_their_control_flow(verb):
    def step(task, update, batch):
        inside = []
        update.when(
            update.step > 0, lambda: inside.append(update.gradients(task.per_example, batch))
        )
        own = update.gradients(task.per_example, batch)
        if verb == "apply":
            update.apply(inside[0])
        elif verb == "add":
            update.apply(own + inside[0])
        else:
            update.apply(update.gradients(task.per_example, batch, same_draws_as=inside[0]))

    refused("computed within update.when cannot be used outside", step)


@pytest.mark.parametrize("given", [True, "sum"])
def test_draws_of_no_pass(given):
    def step(task, update, batch):
        one, other = (update.gradients(task.per_example, batch) for _ in range(2))
        earlier = one + other if given == "sum" else given
        update.apply(update.gradients(task.per_example, batch, same_draws_as=earlier))

    refused("same_draws_as must be gradients that update.gradients returned", step)


@pytest.mark.parametrize("of", ["step", "sum"])
def test_a_condition_that_is_false_while_planning(of):
    """The state begins at 0, and the sums of a planning trace are 0."""

    def step(task, update, batch):
        def change():
            update.average(task.slow, of=task.model, decay=0.5)
            task.changes.assign_add(1)

        own = update.gradients(task.per_example, batch)
        update.apply(own)
        update.when((update.step if of == "step" else update.sum(task.ones, batch)) > 0, change)
        update.average(task.slow, of=task.model, decay=0.5)

    def make(step):
        task = Task(step, changes=tf.Variable(0, trainable=False))
        task.slow = keras.models.clone_model(task.model)
        task.ones = lambda features, training: tf.ones([features["x"].shape[0]])
        task.ones.__name__ = "ones"
        return task

    rule = ddl.ExponentialMovingAverage(0.5, warm_up=False)
    trained = trainer(step, make=make, weight_average=rule)
    update = trained._update
    expected = [v.numpy() for v in update.averages.variables]
    for _ in range(3):
        trained.train(1)
        weights = [v.value.numpy() for v in trained.model.trainable_variables]
        expected = [0.5 * (a + w) for a, w in zip(expected, weights, strict=True)]
    assert trained.task.changes.numpy() == {"step": 2, "sum": 3}[of]
    for average, own in zip(update.averages.variables, expected, strict=True):
        np.testing.assert_allclose(average.numpy(), own, rtol=0, atol=1e-12)


@pytest.mark.parametrize("way", ["sum", "each", "microbatches"])
def test_a_trainable_model_outside_of_the_task(way):
    set_precision("float64")
    strategy = make_strategy("mirrored", 2)
    with strategy.scope():
        hidden = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, name="hidden")])

    def make(step):
        task = Task(step)
        task.apart = lambda features, training: ddl.PerExample(
            tf.reduce_sum((task.model(features["x"]) - hidden(features["x"])) ** 2, axis=1)
        )
        task.apart.__name__ = "apart"
        return task

    def step(task, update, batch):
        each = (lambda own: own) if way == "each" else None
        update.apply(update.gradients(task.apart, batch, each=each))

    arguments = {"accumulation_steps": 2 if way == "microbatches" else 1, "strategy": strategy}
    refused(
        "depends on the trainable variables .*hidden/kernel.*nothing updates them and no "
        "checkpoint holds them.*passes their model to update.minimize",
        step,
        make=make,
        **arguments,
    )
    hidden.trainable = False
    if way == "sum":
        trainer(
            step,
            make=lambda step: (task := make(step), vars(task).update(frozen=hidden))[0],
            strategy=strategy,
        ).trace()


def test_a_plateau_for_two_optimizers():
    plateau = ReduceOnPlateau(0.1, metric="loss")
    optimizers = {name: keras.optimizers.SGD(plateau) for name in ("one", "other")}
    with pytest.raises(ConfigError, match="share a ReduceOnPlateau"):
        plateaus_of(optimizers)


def test_a_frozen_layer_may_stay():
    """It has no gradients and no slots."""
    differentiated = []

    def step(task, update, batch):
        gradients = update.gradients(task.per_example, batch)
        differentiated.append([v.path for v in gradients.variables])
        update.apply(gradients)

    def make(step):
        task = Task(step, teacher=perceptron(6, 1))
        task.model = keras.Sequential(
            [keras.Input((6,)), keras.layers.Dense(4), keras.layers.Dense(3)]
        )
        task.teacher.trainable = task.model.layers[0].trainable = False
        return task

    strategy = make_strategy("mirrored", 2)
    with strategy.scope():
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    made = trainer(step, make=make, optimizer=optimizer, strategy=strategy)
    made.train(1)
    paths = [v.path for v in made.model.layers[1].variables]
    assert len(paths) == 2
    assert differentiated
    assert all(each == paths for each in differentiated)
    slots = [v for v in made.optimizer.variables if v.shape.rank]
    assert [v.shape for v in slots] == [v.shape for v in made.model.layers[1].variables]


def test_parameter_servers_have_no_global_batch(monkeypatch):
    strategy = make_strategy("one_device", 1)
    asynchronous = dataclasses.replace(traits_of(strategy), asynchronous=True)
    monkeypatch.setattr(assembly, "traits_of", lambda _: asynchronous)
    refused("--strategy=parameter_server cannot run", minimize, strategy=strategy)


@pytest.mark.parametrize("verb", ["gradients", "apply", "average", "when", "moved"])
@pytest.mark.parametrize("way", ["cond", "while_loop", "function", "run"])
def test_a_verb_in_control_flow_of_tensorflow(verb, way):
    def step(task, update, batch):
        gradients = update.gradients(task.per_example, batch)
        update.apply(gradients)

        def call():
            if verb == "moved":
                with update.moved(task.model, gradients):
                    pass
            else:
                {
                    "gradients": lambda: update.gradients(task.per_example, batch),
                    "apply": lambda: update.apply(gradients),
                    "average": lambda: update.average(task.slow, of=task.model, decay=0.5),
                    "when": lambda: update.when(update.step > 3, lambda: None),
                }[verb]()
            return tf.constant(0)

        if way == "cond":
            tf.cond(update.step > 3, call, lambda: tf.constant(0))
        elif way == "while_loop":
            tf.while_loop(lambda i: i < 3, lambda i: call() + 1, [tf.constant(0)])
        elif way == "function":
            tf.function(call, autograph=False)()
        else:
            tf.distribute.get_strategy().run(call)

    def make(step):
        task = Task(step)
        task.slow = keras.models.clone_model(task.model)
        task.slow.trainable = False
        return task

    refused(
        "within a loss or `strategy.run`"
        if way == "run"
        else rf"update.{verb} was called within tf.cond.*update.when.*Python `for`",
        step,
        make=make,
    )


@pytest.mark.parametrize("how", ["if", "for"])
def test_python_control_flow_on_a_tensor(how):
    def step(task, update, batch):
        if how == "for":
            for _ in tf.range(update.step):
                pass
        elif update.step > 3:
            minimize(task, update, batch)
        minimize(task, update, batch)

    refused("uses a tensor where Python needs a value.*update.when", step)


def test_apply_within_moved():
    def step(task, update, batch):
        gradients = update.gradients(task.per_example, batch)
        with update.moved(task.model, gradients):
            update.apply(gradients)

    refused("update.apply would change weights within `with update.moved", step)


def test_targets_of_other_shapes():
    def step(task, update, batch):
        minimize(task, update, batch)
        update.average(task.slow, of=task.model, decay=0.5)

    refused(
        "must have weights of the same shapes",
        step,
        make=lambda step: Task(step, slow=perceptron(6, 1)),
    )


@pytest.mark.parametrize("decay", [-0.1, 1.0, 2])
def test_a_decay_out_of_range(decay):
    def step(task, update, batch):
        minimize(task, update, batch)
        update.average(task.model, of=task.model, decay=decay)

    refused("decay must be at least 0 and below 1", step)


def test_a_task_without_a_model_names_it_in_each_verb():
    with pytest.raises(ConfigError, match="Gan has no `model`, so each call must name"):
        build(
            "Gan",
            make_strategy("one_device", 1),
            change=lambda task: setattr(
                task, "step", lambda update, batch: update.minimize(task.fools, batch)
            ),
        )


def test_evaluation_needs_a_function():
    with pytest.raises(ConfigError, match="Gan cannot be evaluated: it has neither"):
        build("Gan", make_strategy("one_device", 1), eval_data=data(48))


def test_evaluation_by_a_function_of_its_own():
    def change(task):
        task.evaluate = lambda features: ddl.PerExample(task.score(features["x"], False) ** 2)

    trained = build("Gan", make_strategy("mirrored", 2), eval_data=data(53), change=change)
    expected = trained.task.discriminator(data(53)["x"]) ** 2
    assert trained.eval_metric_names == ("loss",)
    assert trained.evaluate()["loss"] == pytest.approx(float(tf.reduce_mean(expected)), abs=1e-12)


def test_a_loss_across_examples():
    def step(task, update, batch):
        def across(features, training):
            output = task.per_example(features, training)
            return output._replace(loss=output.loss - tf.reduce_mean(output.loss))

        update.minimize(across, batch)

    with pytest.raises(ConfigError, match=r"Task.across, with training=True: the loss of an exa"):
        trainer(step).train(1)


def test_losses_of_layers():
    def make(step):
        task = Task(step)
        task.model = keras.Sequential(
            [keras.Input((6,)), keras.layers.Dense(3, activity_regularizer="l2")]
        )
        return task

    refused("has losses of its own", minimize, make=make)
