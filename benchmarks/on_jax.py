"""The MLP on JAX: Keras's `fit`, and a bare `jax.lax.scan` with optax.

They have processes of their own with KERAS_BACKEND=jax, since Keras has one backend in a process.
"""

from typing import Any

import jax
import keras
import numpy as np
import optax

from benchmarks.by_keras import fit, mlp
from benchmarks.cases import Case
from benchmarks.harness import Window, timed


def _given(case: Case) -> tuple[keras.Model, np.ndarray, np.ndarray]:
    """Returns an MLP, random images and labels."""
    generator = np.random.default_rng(0)
    images = generator.random((case.examples, 28, 28, 1), np.float32)
    labels = generator.integers(0, 10, case.examples)
    return mlp(case, keras.layers.Dropout), images, labels


def by_fit(case: Case) -> Window:
    """Trains by `fit` as the tutorials call it."""
    model, images, labels = _given(case)
    data = {"x": images, "y": labels, "batch_size": case.batch}
    return fit(model, keras.optimizers.Adam(), case.steps, data)


def by_scan(case: Case) -> Window:
    """Trains by a scan on rows that it gathers from arrays on the device, without metrics."""
    model, *arrays = _given(case)
    images, labels = map(jax.numpy.asarray, arrays)
    order = np.random.default_rng(0).permutation(case.examples)
    order = np.resize(order, [case.updates, case.batch])
    adam = optax.adam(1e-3)

    def loss_of(weights: Any, others: Any, rows: Any) -> tuple[Any, Any]:
        logits, others = model.stateless_call(weights, others, images[rows], training=True)
        each = optax.softmax_cross_entropy_with_integer_labels(logits, labels[rows])
        return each.mean(), others

    def step(state: Any, rows: Any) -> tuple[Any, None]:
        weights, others, slots = state
        gradient, others = jax.grad(loss_of, has_aux=True)(weights, others, rows)
        change, slots = adam.update(gradient, slots)
        return (optax.apply_updates(weights, change), others, slots), None

    train = jax.jit(lambda state: jax.lax.scan(step, state, order)[0])
    weights = [v.value for v in model.trainable_variables]
    states = [(weights, [v.value for v in model.non_trainable_variables], adam.init(weights))]

    def window() -> None:
        states[0] = jax.block_until_ready(train(states[0]))

    return timed(window, case.updates)
