"""Random numbers of Keras and ddl by position in the global batch."""

import inspect

import keras
import numpy as np
import pytest
import scipy.stats
import tensorflow as tf
from keras.src.backend.tensorflow import random as of_keras

import ddl.random
from ddl.errors import ConfigError
from tests.conftest import microbatch

ROWS, PART = 12, 4


def traced(call, rows, **attributes):
    """Returns a function of the first row that calls another in a pass with some attributes."""

    @tf.function(autograph=False)
    def run(first):
        current = microbatch(first_row=first, rows=rows)
        vars(current).update(attributes)
        with current.forward():
            return call(first, rows)

    return run


def placing(call):
    """Returns where the draws of a function lie, as the probes of a loss find it."""
    found = [{}, {}]
    for rows, drawn in zip(ddl.random.PROBED, found, strict=True):
        traced(call, rows, drawn=drawn).get_concrete_function(tf.TensorSpec([], tf.int64))
    return ddl.random.placing(*found, *ddl.random.PROBED)


def whole_and_parts(call):
    """Returns what a function of first row and rows gives for all rows, and for each third."""
    found = placing(call)

    def at(rows):
        run = traced(call, rows, placing=found)
        drawn = [run(tf.constant(first, tf.int64)) for first in range(0, ROWS, rows)]
        return np.concatenate([np.asarray(part, "f8") for part in drawn])

    return at(ROWS), at(PART)


class Owner:
    name = "owner"


def drawn(draw, shape, **where) -> np.ndarray:
    """Returns what a function of a shape draws by row."""
    with microbatch(rows=shape[0], **where).forward():
        return np.asarray(draw(shape))


OWNER = Owner()


def uniform(shape):
    return ddl.random.uniform(OWNER, shape)


R = keras.random
FUNCTIONS = {
    "uniform": (lambda r, s: R.uniform((r, 3), 1.0, 4.0, seed=s), scipy.stats.uniform(1, 3)),
    "normal": (lambda r, s: R.normal((r, 3), 1.0, 2.0, seed=s), scipy.stats.norm(1, 2)),
    "truncated": (
        lambda r, s: R.truncated_normal((r, 3), 1.0, 2.0, seed=s),
        scipy.stats.truncnorm(-2, 2, 1, 2),
    ),
    "beta": (lambda r, s: R.beta((r, 3), 0.5, 2.0, seed=s), scipy.stats.beta(0.5, 2.0)),
    "beta of a small alpha": (
        lambda r, s: R.beta((r, 3), 0.02, 0.02, "float64", seed=s),
        scipy.stats.beta(0.02, 0.02),
    ),
    "float64": (lambda r, s: R.uniform((r, 3), dtype="float64", seed=s), scipy.stats.uniform()),
    "integers": (lambda r, s: R.randint((r, 3), -2, 5, seed=s), scipy.stats.randint(-2, 5)),
    "categories": (
        lambda r, s: R.categorical(tf.math.log([[0.2, 0.7, 0.1]] * r), 3, seed=s),
        scipy.stats.rv_discrete(values=([0, 1, 2], [0.2, 0.7, 0.1])),
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_each_function_of_keras_draws_by_row_from_its_distribution(name):
    draw, distribution = FUNCTIONS[name]
    generator = keras.random.SeedGenerator()
    whole, parts = whole_and_parts(lambda first, rows: draw(rows, generator))
    np.testing.assert_array_equal(whole, parts)
    assert len(np.unique(whole, axis=0)) > 6
    many = np.sort(drawn(lambda shape: draw(shape[0], generator), [3000]).ravel())
    # Kolmogorov's distance of 9000 numbers is below this with probability 0.9995.
    empirical = np.searchsorted(many, many, side="right") / len(many)
    assert np.abs(empirical - distribution.cdf(many)).max() < 0.0215


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.999, 1.0])
def test_dropout_keeps_the_share_that_is_asked_for_and_scales_it(rate):
    kept = drawn(lambda shape: keras.random.dropout(tf.ones(shape), rate), [400, 3, 13])
    share = (kept != 0).mean()
    deviation = (rate * (1 - rate) / kept.size) ** 0.5
    assert share == pytest.approx(1 - rate, abs=4 * deviation + 1e-9)
    np.testing.assert_allclose(kept[kept != 0], 1 / max(1 - rate, 1e-9), rtol=0.02)
    # Both halves of each word: neighbours are as unlike as any two.
    left, right = kept[..., :12:2] != 0, kept[..., 1:12:2] != 0
    assert (left == right).mean() == pytest.approx(rate**2 + (1 - rate) ** 2, abs=0.03)


def compiled(draw, by_xla):
    """What a function of a graph draws, 300 numbers for each of 8 rows."""

    # The batch is an argument: TensorFlow computes what is constant before XLA compiles.
    def draw_rows(batch):
        with microbatch(rows=8, batch=batch).forward():
            return draw([8, 300])

    function = tf.function(draw_rows, autograph=False, jit_compile=by_xla)
    return function(tf.constant(3, tf.int64)).numpy()


def test_xla_draws_the_same():
    for draw in (uniform, R.normal, lambda shape: R.randint(shape, 0, 9)):
        np.testing.assert_array_equal(compiled(draw, True), compiled(draw, False))


def test_a_draw_that_does_not_follow_the_rows_is_shared():
    """Even if its first dimension is the number of rows by chance."""
    for size in (1, 2, 4, 12):
        whole, parts = whole_and_parts(
            lambda first, rows, size=size: tf.tile(uniform([size, 5])[:1], [rows, 1])
        )
        np.testing.assert_array_equal(parts, whole)
        assert len(np.unique(whole, axis=0)) == 1


@pytest.mark.parametrize("where", [{"batch": 4}, {"seed": 6}, {"training": False}], ids=str)
def test_batches_seeds_and_evaluation_draw_apart(where):
    one, other = (drawn(uniform, [8, 4], **w) for w in ({}, where))
    assert not (one == other).any()


def test_owners_and_calls_draw_apart():
    seeds = [None, None, *map(keras.random.SeedGenerator, (None, 1, 2)), Owner(), 3]
    with microbatch().forward():
        values = [R.uniform([8, 4], seed=seed).numpy() for seed in seeds]
    for i, one in enumerate(values):
        for other in values[i + 1 :]:
            assert not (one == other).any()


def test_an_integer_seed_draws_the_same_in_each_update_and_call_but_not_for_each_row():
    def twice(shape):
        return tf.concat([R.uniform(shape, seed=7), R.uniform(shape, seed=7)], axis=1)

    one = drawn(twice, [8, 4])
    for where in ({"batch": 4}, {"seed": 6}, {"training": False}):
        np.testing.assert_array_equal(drawn(twice, [8, 4], **where), one)
    np.testing.assert_array_equal(one[:, :4], one[:, 4:])
    assert len(np.unique(one)) == 32


def noisy(row):
    return row + R.uniform((3,))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda first, rows: R.uniform((3, rows)), "The first dimension must be the examples"),
        (lambda _, rows: [R.uniform((2,)) for _ in range(rows)], "draws 2 times .* 4 times for 4"),
        (lambda _, rows: R.shuffle(tf.range(rows)), "calls keras.random.shuffle.*layers.Mixup"),
        (lambda _, rows: R.binomial((rows,), 3, 0.5), "binomial, .*by position"),
        (
            lambda first, rows: keras.random.SeedGenerator(1, name="mine").next(),
            "'mine' takes seeds from a keras.random.SeedGenerator",
        ),
        (
            lambda first, rows: tf.while_loop(
                lambda x: x[0] < 9.0, lambda x: (x + R.uniform((3,)),), (tf.zeros([3]),)
            ),
            "'while' draws random numbers in a loop .*Draw the numbers for all iterations before",
        ),
        (
            lambda _, rows: [tf.vectorized_map(f, tf.zeros([rows, 3])) for f in (tf.abs, noisy)],
            "'loop_body_1' draws random numbers in a loop",
        ),
    ],
    ids=["last", "each", "shuffle", "binomial", "next", "while", "vectorized"],
)
def test_refuses_what_cannot_be_drawn_by_row(call, message):
    with pytest.raises(ConfigError, match=message):
        placing(call)


def test_without_two_probes_rows_are_unknown():
    current = microbatch(rows=8)
    current.placing = None
    with current.forward(), pytest.raises(ConfigError, match="a fixed batch size"):
        ddl.random.uniform(Owner(), [8, 3])


def test_outside_of_a_pass_keras_draws_as_ever():
    """Also in tf.init_scope of a pass, where layers draw their weights."""
    generator, plain = keras.random.SeedGenerator(7), keras.random.SeedGenerator(7)
    kept = []

    @tf.function(autograph=False)
    def passed():
        with microbatch(rows=3).forward(), tf.init_scope():
            kept.append(keras.random.uniform([3], seed=generator).numpy())

    passed()
    expected = [of_keras.uniform.__wrapped__([3], seed=plain).numpy() for _ in range(2)]
    np.testing.assert_array_equal(kept, expected[:1])
    np.testing.assert_array_equal(keras.random.uniform([3], seed=generator), expected[1])
    assert ddl.random.normal(Owner(), [2, 3]).shape == (2, 3)


def test_keras_still_looks_its_functions_up_in_the_module_that_ddl_changes(monkeypatch):
    """A canary: the module is private to Keras, and a function that it gains would draw as ever."""
    asked = []
    names = (
        *("beta", "binomial", "categorical", "dropout", "gamma", "normal", "randint"),
        *("shuffle", "truncated_normal", "uniform"),
    )
    assert {name for name in dir(keras.random) if name[0] != "_"} == {*names, "SeedGenerator"}
    functions = dict(inspect.getmembers(of_keras, inspect.isfunction))
    own = {n for n, each in functions.items() if each.__module__ == of_keras.__name__}
    assert {name for name in own if name[0] != "_"} == {*names}
    for name in names:
        assert hasattr(getattr(of_keras, name), "__wrapped__")
        monkeypatch.setattr(of_keras, name, lambda *a, name=name, **k: asked.append(name))
    ones = tf.ones([2, 2])
    keras.random.beta((2,), 1.0, 1.0)
    keras.random.binomial((2,), 1.0, 0.5)
    keras.random.categorical(ones, 1)
    keras.random.dropout(ones, 0.5)
    keras.random.gamma((2,), 1.0)
    keras.random.normal((2,))
    keras.random.randint((2,), 0, 2)
    keras.random.shuffle(ones)
    keras.random.truncated_normal((2,))
    keras.random.uniform((2,))
    assert tuple(asked) == names
    with pytest.raises(ConfigError, match="takes seeds"), microbatch().forward():
        keras.random.SeedGenerator(1).next()
