"""Further batches of a step, and several sources of data."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.errors import ConfigError, ModelDirectoryError
from ddl.precision import set_precision
from tests.conftest import make_strategy
from tests.step.verbs.own_steps import copies, momentum, perceptron

NAMES = ("labelled", "unlabelled")


def numbered(examples, **features):
    return {"number": np.arange(examples, dtype=np.float64), **features}


def sources():
    """53 and 40 examples; the second source has other features."""
    random = np.random.default_rng(0)
    x = random.normal(size=(93, 6))
    return {
        "labelled": numbered(53, x=x[:53], label=random.integers(0, 3, 53)),
        "unlabelled": numbered(40, y=x[53:, :4]),
    }


class Semi:
    """A loss of each source; further batches of both, in and out of a repeat."""

    def __init__(self):
        self.model = perceptron(6, 3)
        self.mean_numbers = tf.Variable(tf.zeros([7], tf.float64), trainable=False)

    def per_example(self, features, training):
        logits = self.model(features["x"], training=training)
        return ddl.PerExample(
            tf.nn.sparse_softmax_cross_entropy_with_logits(features["label"], logits)
        )

    def small(self, features, training):
        padded = tf.pad(features["y"], [[0, 0], [0, 2]])
        return ddl.PerExample(tf.reduce_sum(self.model(padded, training=training) ** 2, axis=1))

    def numbers(self, features, training):
        return features["number"]

    def unlabelled_numbers(self, features, training):
        return features["number"]

    def note(self, place, mean):
        place = tf.reshape(tf.cast(place, tf.int32), [1, 1])
        noted = tf.tensor_scatter_nd_update(self.mean_numbers, place, [mean])
        self.mean_numbers.assign(noted)

    def step(self, update, batch):
        labelled, unlabelled = batch["labelled"], batch["unlabelled"]
        further = update.next(labelled)
        means = [update.mean(self.numbers, one) for one in (labelled, further)]
        means.append(update.mean(self.unlabelled_numbers, unlabelled))
        for place, mean in enumerate(means):
            self.note(place, mean)

        for turn in range(4):
            own = update.next(unlabelled)
            self.note(turn + 3, update.mean(self.unlabelled_numbers, own))
            update.minimize(self.small, own)
        update.minimize(self.per_example, further)


def build(strategy, **arguments):
    set_precision("float64")
    keras.utils.set_random_seed(7)
    with strategy.scope():
        given = {
            "train_data": sources(),
            "global_batch_size": {"labelled": 16, "unlabelled": 8},
            "seed": 3,
            **arguments,
        }
        return ddl.Trainer(Semi(), momentum(0.02), strategy=strategy, **given)


def means_of_numbers(trainer):
    return trainer.task.mean_numbers.numpy()


def expected_means(update, examples, size, places):
    """Means of the numbers of batches in order; the last batch of an epoch is smaller."""
    batches = -(-examples // size)
    return [
        np.arange(examples)[place % batches * size :][:size].mean()
        for place in (update * len(places) + np.asarray(places))
    ]


def test_each_update_reads_the_next_batches_in_order():
    """53 examples make 4 batches of 16, of which an update reads 2; 40 make 5 of 8, it reads 5."""
    trainer = build(make_strategy("mirrored", 2), shuffle=False)
    assert trainer.steps_per_epoch == 2
    for update in range(3):
        if update == 2:  # as after a restart
            trainer.state = trainer.state._replace(batches=tf.identity(trainer.state.batches))
        trainer.train(1)
        labelled = expected_means(update, 53, 16, [0, 1])
        unlabelled = expected_means(update, 40, 8, [0, 1, 2, 3, 4])
        np.testing.assert_allclose(means_of_numbers(trainer), labelled + unlabelled, atol=1e-12)


@pytest.fixture(scope="module")
def on_one_device():
    trainer = build(make_strategy("one_device", 1))
    return trainer.train(6), copies(trainer)


def save(folder, trainer):
    checkpoints = ddl.Checkpoints(folder, trainer)
    checkpoints.save()
    checkpoints.wait()


def test_resumed_to_the_bit_and_refused_with_other_batches(tmp_path, on_one_device):
    first = build(make_strategy("one_device", 1))
    first.train(3)
    save(tmp_path, first)
    resumed = build(make_strategy("one_device", 1))
    ddl.Checkpoints(tmp_path, resumed).restore_latest()
    resumed.train(3)
    for (ours, *_), (theirs, *_) in zip(copies(resumed), on_one_device[1], strict=True):
        np.testing.assert_array_equal(ours, theirs)
    sizes = {"labelled": 16, "unlabelled": 4}
    other = build(make_strategy("one_device", 1), global_batch_size=sizes)
    message = r"global batch size of source 2 \(unlabelled\) must be 8, .*, got 4"
    with pytest.raises(ModelDirectoryError, match=message):
        ddl.Checkpoints(tmp_path, other).restore_latest()
    reordered = dict(reversed(sources().items()))  # epochs would be those of the other source
    other = build(make_strategy("one_device", 1), train_data=reordered)
    with pytest.raises(ModelDirectoryError, match=r"source 1 \(labelled\) must be 16.*got None"):
        ddl.Checkpoints(tmp_path, other).restore_latest()


class Single:
    """One source, of which a step reads as many further batches as `further` calls."""

    def __init__(self, step):
        self.model = perceptron(6, 3)
        self.step = lambda update, batch: step(self, update, batch)

    def per_example(self, features, training):
        return ddl.PerExample(tf.reduce_sum(self.model(features["x"], training=training) ** 2, 1))

    def of_a_row(self, features, training):
        return ddl.PerExample(tf.reduce_sum(self.model(features["x"], training=training), 1))


def single(step, data=None, **arguments):
    set_precision("float64")
    data = {"x": np.ones([24, 6])} if data is None else data
    arguments = {"global_batch_size": 8, **arguments}
    return ddl.Trainer(Single(step), momentum(0.02), data, **arguments)


def minimizing_next(task, update, batch):
    update.minimize(task.per_example, update.next(batch))


def in_when(task, update, batch):
    update.when(update.step > 0, lambda: minimizing_next(task, update, batch))


def of_all_sources(task, update, batch):
    update.minimize(task.per_example, batch)


def of_one_source(task, update, batch):
    update.minimize(task.per_example, batch["one"])


def of_two_forms(task, update, batch):
    for one in batch.values():
        update.minimize(task.per_example, one)


TWO = {"one": {"x": np.ones([24, 6])}, "other": {"x": np.ones([24, 6]), "z": np.ones(24)}}
REFUSED = [
    (in_when, None, 8, "update.next must read as many batches each time"),
    (
        of_all_sources,
        TWO,
        8,
        r"takes a batch that the step was given.*With several sources, pass one",
    ),
    (
        of_two_forms,
        TWO,
        8,
        "two losses have the name 'per_example', or one has it for sources of other",
    ),
    (of_one_source, TWO, 8, "never uses the source 'other'"),
    (of_two_forms, TWO, {"one": 8}, r"that of each source, \['one', 'other'\], got {'one': 8}"),
    (of_two_forms, None, {"one": 8}, r"that of each source, \[''\], got {'one': 8}"),
    (of_two_forms, TWO, {"one": 8, "other": 0}, "integer of at least 1, got 0"),
]


@pytest.mark.parametrize(("step", "data", "size", "message"), REFUSED)
def test_misuse_is_refused(step, data, size, message):
    with pytest.raises(ConfigError, match=message):
        single(step, data, global_batch_size=size)
