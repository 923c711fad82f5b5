"""Steps by hand beside which benchmarks.gpu_counts counts: no checks, and no state for a run.

They use TensorFlow's fused kernel of an optimizer where it computes what Keras's optimizer does,
and otherwise the formula, one variable at a time. They do what ddl does in the row, so that the
counts can be compared: bytes are scaled, and half precision keeps variables of float32.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from benchmarks.gpu_rows import Row, network

RATE, DECAY, MOMENTUM = 1e-3, 4e-3, 0.9
_GROWS_AFTER = 2000

Gradients = Sequence[tf.Tensor]


def step_of(row: Row, metrics: bool) -> tuple[Callable[..., Any], tuple[Any, Any]]:
    """Builds the step of a row, in the strategy's scope.

    Args:
      row: The row.
      metrics: Whether the step counts right answers too.

    Returns:
      A function of a replica's batch that returns the loss, [], or with metrics [2]: the loss and
      the number of right answers; for replica context in a graph. And the arrays of the data.
    """
    model, arrays = network(row)
    if row.evaluates:
        return functools.partial(_evaluated, model), arrays
    return _Step(row, model, metrics), arrays


class _Step:
    """One update of a row."""

    def __init__(self, row: Row, model: keras.Model, metrics: bool):
        self._row, self._model, self._metrics = row, model, metrics
        self._variables = variables = [v.value for v in model.trainable_variables]
        self._parts = row.arguments.get("accumulation_steps", 1)
        self._slots = [[_zeros(v), _zeros(v)] for v in variables]
        self._scale = tf.Variable(2.0**15, trainable=False)
        self._finite = tf.Variable(0, trainable=False, dtype=tf.int64)
        self._count = tf.Variable(0, trainable=False, dtype=tf.int64)
        self._averages = [_zeros(v) for v in variables]
        self._augment = keras.Sequential(_augmentations()) if row.task else None

    def __call__(self, images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        """Makes an update; see `step_of`. Replica context."""
        loss, gradients = self._summed(images, labels)
        if self._row.replicas > 1:
            context = tf.distribute.get_replica_context()
            gradients = context.all_reduce("SUM", gradients)
        if self._row.precision == "mixed_float16":
            self._apply_if_finite(gradients)
        else:
            self._apply(gradients)
        return loss

    def _summed(self, images: tf.Tensor, labels: tf.Tensor) -> tuple[Any, Any]:
        """Returns the loss and the gradients."""
        if self._parts == 1:
            return self._gradients(images, labels, self._row.batch)
        size = images.shape[0] // self._parts

        def turn(number: Any, loss: Any, sums: Any) -> Any:
            rows = slice(number * size, (number + 1) * size)
            part = [tf.ensure_shape(x[rows], [size, *x.shape[1:]]) for x in (images, labels)]
            own, gradients = self._gradients(*part, self._row.batch)
            added = [one + new for one, new in zip(sums, gradients, strict=True)]
            return number + 1, loss + own, added

        start = (tf.constant(0), self._no_figures(), [tf.zeros(v.shape) for v in self._variables])
        _, loss, sums = tf.while_loop(
            lambda number, *_: number < self._parts, turn, start, parallel_iterations=1
        )
        return loss, sums

    def _gradients(self, images: tf.Tensor, labels: tf.Tensor, size: int) -> tuple[Any, Any]:
        with tf.GradientTape() as tape:
            if self._augment is not None:
                images = self._augment(tf.cast(images, tf.float32), training=True)
            loss, logits = _sum_of_losses(self._model, True, images, labels)
            loss /= size
            scaled = loss
            if self._row.precision == "mixed_float16":
                scaled = loss * self._scale
        gradients = [tf.convert_to_tensor(g) for g in tape.gradient(scaled, self._variables)]
        return tf.stack([loss, _right(logits, labels)]) if self._metrics else loss, gradients

    def _no_figures(self) -> tf.Tensor:
        return tf.zeros([2] if self._metrics else [])

    # -------------------------------------------------------- the update

    def _apply_if_finite(self, gradients: Gradients) -> None:
        """Unscales, asks once, and applies or skips; moves the loss scale."""
        factor = 1 / self._scale
        gradients = [gradient * factor for gradient in gradients]
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(g)) for g in gradients])

        def apply() -> tf.Tensor:
            self._apply(gradients)
            return tf.constant(True)

        tf.cond(finite, apply, lambda: tf.constant(False))
        count = tf.where(finite, self._finite + 1, 0)
        grows = count >= _GROWS_AFTER
        moved = tf.where(finite, tf.where(grows, self._scale * 2, self._scale), self._scale / 2)
        self._scale.assign(tf.clip_by_value(moved, 1.0, 2.0**24))
        self._finite.assign(tf.where(grows, tf.zeros_like(count), count))

    def _apply(self, gradients: Gradients) -> None:
        arguments = self._row.arguments
        if "clip_norm" in arguments:
            gradients, _ = tf.clip_by_global_norm(gradients, arguments["clip_norm"])
        rate: Any = RATE
        if self._row.optimizer in ("Adam", "AdamW", "LAMB"):
            rate = self._corrected()
        rule = _RULES[self._row.optimizer]
        for variable, slots, gradient in zip(self._variables, self._slots, gradients, strict=True):
            rule(variable, slots, gradient, rate)
        if "weight_average" in arguments:
            step = tf.maximum(0.01, 9 / tf.cast(self._count.assign_add(1) + 10, tf.float32))
            for average, variable in zip(self._averages, self._variables, strict=True):
                average.assign_sub(step * (average - variable))

    def _corrected(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the powers of Adam's betas."""
        count = tf.cast(self._count.assign_add(1), tf.float32)
        return tf.pow(0.9, count), tf.pow(0.999, count)


# ------------------------------------------------------------ optimizers


def _adam(variable: tf.Variable, slots: Any, gradient: tf.Tensor, powers: Any) -> None:
    tf.raw_ops.ResourceApplyAdam(
        var=variable.handle,
        m=slots[0].handle,
        v=slots[1].handle,
        beta1_power=powers[0],
        beta2_power=powers[1],
        lr=RATE,
        beta1=0.9,
        beta2=0.999,
        epsilon=1e-7,
        grad=gradient,
    )


def _adamw(variable: tf.Variable, slots: Any, gradient: tf.Tensor, powers: Any) -> None:
    variable.assign_sub(variable * (RATE * DECAY))
    _adam(variable, slots, gradient, powers)


def _sgd(variable: tf.Variable, _: Any, gradient: tf.Tensor, rate: float) -> None:
    tf.raw_ops.ResourceApplyGradientDescent(var=variable.handle, alpha=rate, delta=gradient)


def _momentum(variable: tf.Variable, slots: Any, gradient: tf.Tensor, rate: float) -> None:
    tf.raw_ops.ResourceApplyKerasMomentum(
        var=variable.handle, accum=slots[0].handle, lr=rate, grad=gradient, momentum=MOMENTUM
    )


def _rmsprop(variable: tf.Variable, slots: Any, gradient: tf.Tensor, rate: float) -> None:
    tf.raw_ops.ResourceApplyRMSProp(
        var=variable.handle,
        ms=slots[0].handle,
        mom=slots[1].handle,
        lr=rate,
        rho=0.9,
        momentum=0.0,
        epsilon=1e-7,
        grad=gradient,
    )


def _adagrad(variable: tf.Variable, slots: Any, gradient: tf.Tensor, rate: float) -> None:
    # Keras adds epsilon within the root; TensorFlow's kernel adds it outside.
    squares = slots[0].assign_add(tf.square(gradient))
    variable.assign_sub(rate * gradient * tf.math.rsqrt(squares + 1e-7))


def _lars(variable: tf.Variable, slots: Any, gradient: tf.Tensor, rate: float) -> None:
    """You et al. 2017, equations (5) and (6); vectors take the plain rate."""
    if len(variable.shape) > 1:
        gradient *= _ratio(variable, gradient) * 1e-3
    _momentum(variable, slots, gradient, rate)


def _lamb(variable: tf.Variable, slots: Any, gradient: tf.Tensor, powers: Any) -> None:
    """You et al. 2020, algorithm 2; vectors take the plain rate."""
    first, second = slots
    m = first.assign_sub(0.1 * (first - gradient))
    v = second.assign_sub(0.001 * (second - tf.square(gradient)))
    direction = (m / (1 - powers[0])) / (tf.sqrt(v / (1 - powers[1])) + 1e-6)
    if len(variable.shape) > 1:
        direction *= _ratio(variable, direction)
    variable.assign_sub(RATE * direction)


def _ratio(variable: tf.Variable, other: tf.Tensor) -> tf.Tensor:
    """Returns the ratio of two norms, or 1 if one of them is 0."""
    own, norm = tf.norm(variable), tf.norm(other)
    return tf.where((own > 0) & (norm > 0), own / norm, 1.0)


_RULES: dict[str, Callable[..., None]] = {
    "Adam": _adam,
    "AdamW": _adamw,
    "SGD": _sgd,
    "MomentumSGD": _momentum,
    "RMSprop": _rmsprop,
    "Adagrad": _adagrad,
    "LARS": _lars,
    "LAMB": _lamb,
}


# ------------------------------------------------------------ forward


def _sum_of_losses(
    model: keras.Model, training: bool, images: tf.Tensor, labels: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the sum of the examples' losses, [], and the logits."""
    logits = tf.cast(model(images, training=training), tf.float32)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    return tf.reduce_sum(losses if losses.shape.rank == 1 else tf.reduce_mean(losses, -1)), logits


def _evaluated(model: keras.Model, images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    """Returns the sum of the losses and the number of right answers, [2]."""
    loss, logits = _sum_of_losses(model, False, images, labels)
    return tf.stack([loss, _right(logits, labels)])


def _right(logits: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    """Returns the number of right answers, []."""
    right = tf.equal(tf.argmax(logits, -1), tf.cast(labels, tf.int64))
    return tf.reduce_sum(tf.cast(right, tf.float32))


def _augmentations() -> list[keras.layers.Layer]:
    layers = keras.layers
    return [layers.RandomFlip("horizontal"), layers.RandomTranslation(2 / 28, 2 / 28)]


def _zeros(variable: tf.Variable) -> tf.Variable:
    return tf.Variable(tf.zeros_like(variable), trainable=False)
