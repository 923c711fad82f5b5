"""Updates that XLA compiles end where the others do, but for rounding."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl import optimizers
from ddl.precision import set_precision
from tests.conftest import make_strategy, save
from tests.optimizers.given_gradients import assert_close, drawn, updated
from tests.training.parity_cases import UNEVEN, WEIGHED, Case, make_trainer, mlp
from tests.training.test_trainer import all_copies, check_that_overflows_change_nothing

RANDOM = np.random.default_rng(0)
WORDS = RANDOM.integers(0, 11, (66, 9))


class NextWord:
    """A small transformer that predicts each next word, with dropout."""

    def __init__(self) -> None:
        words = keras.Input((8,), dtype="int64", name="words")
        x = keras.layers.Embedding(11, 8)(words)
        y = keras.layers.LayerNormalization()(x)
        x += keras.layers.MultiHeadAttention(2, 4)(y, y, use_causal_mask=True)
        y = keras.layers.Dense(16, "gelu")(keras.layers.LayerNormalization()(x))
        x += keras.layers.Dropout(0.2)(keras.layers.Dense(8)(y))
        self.model = keras.Model(words, keras.layers.Dense(11)(x))

    def per_example(self, features, training):
        logits = self.model(features["words"], training=training)
        loss = tf.nn.sparse_softmax_cross_entropy_with_logits(features["next"], logits)
        return ddl.PerExample(loss, metrics={"right": tf.cast(loss < 1, loss.dtype)})


def digits(images=80):
    pixels, labels = ddl.data.digits("train")
    return {"image": pixels[:images].reshape(-1, 8, 8, 1), "label": labels[:images]}


def digits_cnn():
    model = ddl.models.cnn(
        (8, 8, 1), 10, blocks=((4,),), hidden_units=(8,), batch_normalization=True
    )
    return ddl.Classification(model)


def digits_mlp():
    return ddl.Classification(ddl.models.mlp((8, 8, 1), 10, hidden_units=(16,), dropout=0.2))


class Sam:
    """A step of its own: two gradients, of which one is changed, and an average of weights."""

    def __init__(self) -> None:
        self.model = digits_mlp().model
        self.slow = keras.models.clone_model(self.model)
        self.slow.trainable = False

    def per_example(self, features, training):
        logits = self.model(features["image"], training=training)
        return ddl.PerExample(
            tf.nn.sparse_softmax_cross_entropy_with_logits(features["label"], logits)
        )

    def step(self, update, batch):
        up = update.gradients(self.per_example, batch)
        with update.moved(self.model, up * (0.05 / up.norm())):
            sharp = update.gradients(self.per_example, batch, same_draws_as=up)
        update.apply(sharp)
        update.average(self.slow, of=self.model, decay=0.9)


def sgd():
    return keras.optimizers.SGD(0.1, momentum=0.9)


CASES = {
    "digits CNN, evaluated": (Case(digits_cnn, sgd, digits(), {"eval_data": digits(50)}), 1),
    "transformer": (
        Case(NextWord, sgd, {"words": WORDS[:, :-1], "next": WORDS[:, 1:]}, {"clip_norm": 0.5}),
        1,
    ),
    "own step": (Case(Sam, sgd, digits()), 1),
    "two replicas, accumulation, padding, weights": (
        Case(
            functools.partial(mlp, dropout=0.3),
            lambda: keras.optimizers.SGD(0.05, momentum=0.9, weight_decay=0.01),
            WEIGHED,
            {"accumulation_steps": 2, "clip_norm": 0.05},
        ),
        2,
    ),
}


def strategy_on(replicas):
    return make_strategy("mirrored" if replicas > 1 else "one_device", replicas)


def results(case, replicas, jit_compile):
    """Loss and metrics of training, and of an evaluation if there is one; copies; weights."""
    trainer = make_trainer(case, strategy_on(replicas), "float64", jit_compile=jit_compile)
    assert trainer._update.gradient.compiler.is_on == (jit_compile == "on")
    figures = [*trainer.train(7).values()]
    if trainer.has_eval_data:
        figures += trainer.evaluate().values()
    assert trainer.trace_count == 1
    weights = [v.numpy() for v in trainer.model.variables]
    return [np.array(figures), *(c for copies in all_copies(trainer) for c in copies)], weights


@pytest.mark.parametrize("name", CASES)
def test_parity_with_updates_that_are_not_compiled(name):
    case, replicas = CASES[name]
    ours, weights = results(case, replicas, "on")
    theirs, _ = results(case, replicas, "off")
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-10)
    assert all(np.isfinite(value).all() for value in weights)


@pytest.mark.usefixtures("gpu_path")
@pytest.mark.parametrize("resident", [True, False])
def test_the_host_counts_compiled_updates_on_gpus(resident):
    case = Case(mlp, lambda: keras.optimizers.SGD(0.05), WEIGHED, {"data_on_device": resident})
    for one, other in zip(results(case, 1, "on")[0], results(case, 1, "off")[0], strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-10)


def test_an_overflow_on_one_replica_changes_no_replica():
    check_that_overflows_change_nothing(
        strategy_on(2), [1], batch_normalization=False, jit_compile="on"
    )


def test_resumed_to_the_bit(tmp_path):
    """Within an epoch, with padding; float32."""
    case = Case(
        functools.partial(mlp, dropout=0.3),
        lambda: keras.optimizers.AdamW(0.01),
        UNEVEN,
        {"clip_norm": 0.1, "jit_compile": "on"},
    )
    trainer = make_trainer(case, strategy_on(1), "float32")
    trainer.train(3)
    save(tmp_path, trainer)
    trainer.train(4)
    resumed = make_trainer(case, strategy_on(1), "float32")
    ddl.Checkpoints(tmp_path, resumed).restore_latest()
    resumed.train(4)
    for ours, theirs in zip(all_copies(resumed), all_copies(trainer), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.optimizers.RMSprop(0.01, centered=True),
        lambda: keras.optimizers.Adagrad(0.01),
        lambda: keras.optimizers.Adam(0.01, amsgrad=True),
        lambda: optimizers.LAMB(0.01, weight_decay=0.1),
        lambda: optimizers.LARS(0.01, weight_decay=0.1),
    ],
    ids=["RMSprop", "Adagrad", "amsgrad", "LAMB", "LARS"],
)
def test_optimizers_compile(make):
    """Operations in place of temporary variables and of kernels that XLA lacks."""
    set_precision("float64")
    strategy = make_strategy("one_device", 1)
    weights, gradients = drawn(4)
    keras.utils.set_random_seed(0)  # of slots that begin at the weights
    expected, _ = updated(strategy, make, weights, gradients)

    def compiled():
        optimizer = make()
        apply = optimizer.apply

        def on_xla(given, variables):
            tf.function(lambda: apply(given, variables), autograph=False, jit_compile=True)()

        optimizer.apply = on_xla
        return optimizer

    keras.utils.set_random_seed(0)
    ours, _ = updated(strategy, compiled, weights, gradients)
    assert_close(ours, expected, atol=1e-12)
