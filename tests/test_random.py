"""Random numbers by position, and Keras's generators by replica."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from keras.src.random.seed_generator import draw_seed, global_seed_generator

import ddl.random
from ddl.errors import ConfigError
from tests.conftest import microbatch


class Owner:
    name = "owner"


def drawn(draw, shape, **where) -> np.ndarray:
    current = microbatch(rows=where.pop("rows", shape[0]), **where)
    with current.forward():
        return draw(Owner(), shape).numpy()


@pytest.mark.parametrize("draw", [ddl.random.uniform, ddl.random.normal])
@settings(max_examples=40)
@given(
    rows=st.integers(1, 40),
    features=st.lists(st.integers(1, 7), max_size=3),
    cut=st.tuples(st.integers(0, 40), st.integers(0, 40)),
)
def test_some_rows_are_a_slice_of_all_rows(draw, rows, features, cut):
    start, end = sorted(min(c, rows) for c in cut)
    if start == end:
        return
    whole = drawn(draw, [rows, *features])
    part = drawn(draw, [end - start, *features], first_row=start)
    np.testing.assert_array_equal(part, whole[start:end])


def compiled(draw, by_xla, **where):
    """What a function of a graph draws, 300 numbers for each of 8 rows."""

    # The batch is an argument: TensorFlow computes what is constant before XLA compiles.
    def draw_rows(batch):
        with microbatch(rows=8, batch=batch, **where).forward():
            return draw(Owner(), [8, 300])

    function = tf.function(draw_rows, autograph=False, jit_compile=by_xla)
    return function(tf.constant(3, tf.int64)).numpy()


def test_xla_draws_the_same():
    for draw in (ddl.random.uniform, lambda *where: ddl.random.bernoulli(*where, 0.3)):
        np.testing.assert_array_equal(compiled(draw, True), compiled(draw, False))
    by_xla, plain = (compiled(ddl.random.normal, by_xla) for by_xla in (True, False))
    np.testing.assert_allclose(by_xla, plain, rtol=5e-7, atol=0)
    assert (by_xla == plain).mean() > 0.97
    rows = compiled(ddl.random.normal, True, first_row=2)[:-2]
    np.testing.assert_array_equal(rows, by_xla[2:])


def test_numbers_of_words_in_the_corners():
    """No word may give an infinite number; sin, cos and log are exact at some words."""
    words = tf.constant([[0, 0, -1, -1], [-(2**31), 0x400000, 0x7FFFFF, 0x200000]])
    uniform = ddl.random._uniform_of(words).numpy()
    end = 1 - 2.0**-23
    np.testing.assert_array_equal(uniform, [[0, 0, end, end], [0, 0.5, end, 0.25]])
    normal = ddl.random._normal_of(words).numpy()
    largest = (-2 * np.log(1e-7)) ** 0.5
    np.testing.assert_allclose(normal[0, :2], [0, largest], rtol=1e-6)
    np.testing.assert_allclose(normal[1, 1], -largest, rtol=1e-6)
    assert np.isfinite(normal).all()


@pytest.mark.parametrize("probability", [0.0, 0.3, 0.999, 1.0])
def test_true_comes_as_often_as_asked_and_for_rows_alone(probability):
    def draw(owner, shape):
        return ddl.random.bernoulli(owner, shape, probability)

    whole = drawn(draw, [400, 3, 13])
    part = drawn(draw, [150, 3, 13], first_row=250)
    np.testing.assert_array_equal(part, whole[250:])
    share = ddl.random.as_drawn(probability)
    assert abs(share - probability) <= 2**-17
    deviation = (share * (1 - share) / whole.size) ** 0.5
    assert whole.mean() == pytest.approx(share, abs=4 * deviation)
    # Both halves of each word: neighbours are as unlike as any two.
    left, right = whole[..., :12:2], whole[..., 1:12:2]
    assert (left == right).mean() == pytest.approx(share**2 + (1 - share) ** 2, abs=0.02)


@pytest.mark.parametrize("draw", [ddl.random.uniform, ddl.random.normal])
@pytest.mark.parametrize("known", [True, False])
def test_a_dimension_that_is_not_static_draws_the_same(draw, known):
    @tf.function
    def of_width(width, first_row):
        with microbatch(first_row=2 if known else first_row, rows=4).forward():
            return draw(Owner(), [4, width, 3])

    whole = drawn(draw, [8, 5, 3])
    part = of_width(tf.constant(5), tf.constant(2, tf.int64))
    np.testing.assert_array_equal(part, whole[2:6])


def test_outside_of_a_trainer_keras_draws_for_bernoulli():
    keras.utils.set_random_seed(0)
    kept = ddl.random.bernoulli(Owner(), [2000, 5], 0.3).numpy()
    assert kept.dtype == bool
    assert kept.mean() == pytest.approx(0.3, abs=0.02)


def test_parts_of_examples_belong_to_them():
    """As [batch, time] reshaped to [batch·time]."""
    whole = drawn(ddl.random.uniform, [24, 3], rows=8)
    part = drawn(ddl.random.uniform, [12, 3], rows=4, first_row=4)
    np.testing.assert_array_equal(part, whole[12:])


def test_shared_numbers_are_the_same_for_every_row_and_place():
    def shared(first_row, rows):
        with microbatch(first_row, rows).forward():
            return ddl.random.uniform(Owner(), [1, 5]).numpy()

    np.testing.assert_array_equal(shared(0, 8), shared(4, 4))
    np.testing.assert_array_equal(shared(0, 8), shared(7, 1))


@pytest.mark.parametrize("where", [{"batch": 4}, {"seed": 6}, {"training": False}], ids=str)
def test_batches_seeds_and_evaluation_draw_apart(where):
    one, other = (drawn(ddl.random.uniform, [8, 4], **w) for w in ({}, where))
    assert not (one == other).any()


def test_layers_and_calls_draw_apart():
    first, second, seeded = Owner(), Owner(), Owner()
    seeded.seed = 1
    with microbatch().forward():
        values = [
            ddl.random.uniform(owner, [8, 4]).numpy() for owner in (first, first, second, seeded)
        ]
    with microbatch().forward():
        # Called first, as the first one was, but with a seed of its own.
        values.append(ddl.random.uniform(seeded, [8, 4]).numpy())
    for i, one in enumerate(values):
        for other in values[i + 1 :]:
            assert not (one == other).any()


def test_rows_that_belong_to_no_example():
    with (
        microbatch(rows=8).forward(),
        pytest.raises(
            ConfigError, match="'owner', which draws random .* the 8 examples, got 12 rows"
        ),
    ):
        ddl.random.uniform(Owner(), [12, 3])


def test_the_numbers_are_distributed_as_they_should_be():
    uniform = drawn(ddl.random.uniform, [1000, 50])
    assert 0 <= uniform.min() < 0.001 < 0.999 < uniform.max() < 1
    counts = np.histogram(uniform, 20, (0, 1))[0] / 2500
    assert abs(counts - 1).max() < 0.1
    normal = drawn(ddl.random.normal, [1000, 50])
    assert abs(normal.mean()) < 0.02
    assert abs(normal.std() - 1) < 0.02
    # Neighbours, in rows and in columns, know nothing of one another.
    for one, other in [(uniform[1:], uniform[:-1]), (uniform[:, 1:], uniform[:, :-1])]:
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 0.02


def test_outside_of_a_trainer_keras_draws():
    keras.utils.set_random_seed(1)
    one = ddl.random.normal(Owner(), [2, 3])
    assert not (one.numpy() == ddl.random.normal(Owner(), [2, 3]).numpy()).any()


class Holder(keras.layers.Layer):
    def __init__(self, generator):
        super().__init__()
        self.generator = generator


def seeds(generator, **where):
    with microbatch(**where).forward():
        return [generator.next().numpy().tolist() for _ in range(3)]


def test_a_generator_gives_each_replica_and_batch_its_own_seeds():
    generator = keras.random.SeedGenerator(7)
    ddl.random.seed_by_replica([Holder(generator)])
    state = generator.state.numpy().tolist()
    here = seeds(generator)
    assert here == seeds(generator)
    assert len({tuple(seed) for seed in here}) == 3
    assert here != seeds(generator, first_row=8)
    assert here != seeds(generator, batch=4)
    assert here != seeds(generator, training=False)
    assert generator.state.numpy().tolist() == state
    other = keras.random.SeedGenerator(8)
    ddl.random.seed_by_replica([Holder(other)])
    assert here != seeds(other)


def test_rows_that_are_not_known():
    @tf.function(input_signature=[tf.TensorSpec([None, 3])], autograph=False)
    def drawn(x):
        with microbatch(rows=8).forward():
            return ddl.random.uniform(Owner(), keras.ops.shape(x))

    with pytest.raises(ConfigError, match="an unknown number of rows"):
        drawn(tf.ones([8, 3]))


def test_no_two_draws_of_a_batch_share_a_seed():
    generator = keras.random.SeedGenerator(7)
    ddl.random.seed_by_replica([Holder(generator)])
    drawn = [tuple(seed) for row in range(8) for seed in seeds(generator, first_row=row)]
    assert len(set(drawn)) == 24


@tf.function(autograph=False)
def in_three_turns(layer):
    """What a layer gives in each turn of a loop on tensors."""
    x = tf.ones([8, 4])

    def turn(number, outputs):
        return number + 1, outputs.write(number, layer(x, training=True))

    with microbatch().forward():
        start = (tf.constant(0), tf.TensorArray(tf.float32, 3))
        return tf.while_loop(lambda number, _: number < 3, turn, start)[1].stack()


def test_a_loop_on_tensors_would_draw_the_same_in_each_turn():
    with pytest.raises(
        ConfigError, match="'drop', which draws random numbers, must not run inside a loop"
    ):
        in_three_turns(keras.layers.Dropout(0.5, name="drop"))


def test_keras_layers_draw_anew_in_each_turn_of_a_loop():
    layers = [keras.layers.Dropout(0.5, seed=seed) for seed in (1, 2)]
    ddl.random.seed_by_replica(layers)
    turns = [turn for layer in layers for turn in in_three_turns(layer).numpy()]
    for i, one in enumerate(turns):
        for other in turns[i + 1 :]:
            assert (one != other).any()


def test_a_generator_goes_on_as_keras_wants_outside():
    generator, plain = keras.random.SeedGenerator(7), keras.random.SeedGenerator(7)
    ddl.random.seed_by_replica([Holder(generator)])
    for _ in range(2):
        assert generator.next().numpy().tolist() == plain.next().numpy().tolist()


def global_seeds(seed=5, **where):
    """Seeds that keras.random functions without a seed take in a pass."""
    with microbatch(seed=seed, **where).forward():
        return [draw_seed(None).numpy().tolist() for _ in range(2)]


def test_keras_draws_without_a_seed_by_the_seed_of_the_pass_and_by_replica():
    here = global_seeds()
    assert here == global_seeds()
    assert here[0] != here[1]
    others = ({"first_row": 8}, {"batch": 4}, {"training": False}, {"seed": 6})
    assert all(here[0] not in global_seeds(**other) for other in others)


def test_so_does_it_within_a_graph_but_not_for_what_leaves_it():
    kept = []

    @tf.function(autograph=False)
    def drawn():
        with microbatch().forward():
            with tf.init_scope():
                kept.append(keras.random.uniform([3]).numpy())
            return draw_seed(None)

    assert drawn().numpy().tolist() == global_seeds()[0]
    assert len(kept) == 1


def test_the_weights_that_a_pass_draws_follow_python():
    def weights(seed):
        keras.utils.set_random_seed(seed)
        return global_seeds(seed=None)

    assert weights(1) == weights(1)
    assert weights(1) != weights(2)


def test_after_a_pass_keras_draws_as_before():
    keras.utils.set_random_seed(0)
    generator = global_seed_generator()
    global_seeds()
    assert global_seed_generator() is generator


def test_a_loop_would_draw_the_same_without_a_seed():
    class Noise(keras.layers.Layer):
        def call(self, x, training=False):
            return x + keras.random.normal(x.shape)

    with pytest.raises(ConfigError, match="without a seed must not run inside a loop"):
        in_three_turns(Noise())
