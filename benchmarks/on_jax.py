"""The MLP and the CNN of the loop's benchmark on JAX: Keras's fit, and a bare scan with optax.

A process of its own, since Keras has one backend in a process: `benchmarks.contenders` starts
`python -m benchmarks.on_jax fit CASE` with the case as JSON. Each line that it reads makes a
window, whose seconds an update it prints.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

import jax
import keras
import numpy as np
import optax

from benchmarks.harness import timed


def network(name: str) -> keras.Model:
    """Builds a network, up to the logits."""
    layers = keras.layers
    if name == "MLP":
        inner = [layers.Flatten(), layers.Dense(128, "relu"), layers.Dropout(0.2)]
    else:
        inner = [layers.Conv2D(32, 3, activation="relu"), layers.Conv2D(64, 3, activation="relu")]
        inner += [layers.MaxPooling2D(), layers.Dropout(0.25), layers.Flatten()]
        inner += [layers.Dense(128, "relu"), layers.Dropout(0.5)]
    return keras.Sequential([keras.Input((28, 28, 1)), *inner, layers.Dense(10)])


def fit(case: Any, images: np.ndarray, labels: np.ndarray) -> Callable[[], float]:
    """Trains by Keras's `fit`; returns a window."""
    model = network(case["network"])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(), loss, metrics=["accuracy"])
    rows = case["steps"] * case["batch"]
    given = {"x": images[:rows], "y": labels[:rows], "batch_size": case["batch"], "verbose": 0}
    return timed(lambda: model.fit(**given), case["steps"])


def scan(case: Any, images: np.ndarray, labels: np.ndarray) -> Callable[[], float]:
    """Trains the network by a `jax.lax.scan` over rows of arrays on the device, without metrics."""
    model, adam = network(case["network"]), optax.adam(1e-3)
    count = case["steps"] * case["longer"]
    held = jax.numpy.asarray(images), jax.numpy.asarray(labels)

    def loss_of(weights: Any, others: Any, rows: Any) -> tuple[Any, Any]:
        logits, others = model.stateless_call(weights, others, held[0][rows], training=True)
        each = optax.softmax_cross_entropy_with_integer_labels(logits, held[1][rows])
        return each.mean(), others

    @jax.jit
    def train(state: Any, order: Any) -> Any:
        def step(state: Any, rows: Any) -> tuple[Any, None]:
            weights, others, slots = state
            gradient, others = jax.grad(loss_of, has_aux=True)(weights, others, rows)
            change, slots = adam.update(gradient, slots)
            return (optax.apply_updates(weights, change), others, slots), None

        return jax.lax.scan(step, state, order)[0]

    weights = [v.value for v in model.trainable_variables]
    states = [(weights, [v.value for v in model.non_trainable_variables], adam.init(weights))]

    def window() -> None:
        order = np.random.default_rng(0).permutation(len(images))[: count * case["batch"]]
        states[0] = jax.block_until_ready(train(states[0], order.reshape(count, -1)))

    return timed(window, count)


def main() -> None:
    """Prints the figure of a window for each line of the input."""
    kind, case = sys.argv[1], json.loads(sys.argv[2])
    generator = np.random.default_rng(0)
    images = generator.random((case["examples"], 28, 28, 1), np.float32)
    labels = generator.integers(0, 10, case["examples"])
    window = {"fit": fit, "scan": scan}[kind](case, images, labels)
    for _ in sys.stdin:
        print(window(), flush=True)


if __name__ == "__main__":
    main()
