"""Operations of an update on a GPU: python -m benchmarks.gpu_counts.

This benchmark needs no GPU. It traces the training loop with ddl's choices for GPUs and without
XLA, and counts in the graph what one update does: operations that start a kernel, call a library or
copy; bytes that cross between host and device, or between devices, without those of collectives;
and operations that a GPU leaves to the host, for want of a kernel or because TensorFlow keeps their
data in host memory. TensorFlow's graph optimizer joins some of these operations before they run.
Kernels and library calls of six trainers were counted with TensorFlow 2.21, and the operations
differ from them by less than 15%. Matrix products, convolutions,
fused batch normalization and max pooling are library calls; the others are kernels. The host counts
the updates, so that nothing crosses for the condition of the loop.

Each row changes one thing of the first row of its network. The MLP is 784-128-10 with a batch of
64, float32 and Adam; the CNN has two convolutions with batch normalization; the GPT has two
blocks of width 64; ResNet-50 has images of 64 by 64 and a batch of 32. Rows of an evaluation count
a batch of it. XLA makes fewer kernels of an update (`--jit_compile`), which a graph does not show.

Two steps written by hand (`benchmarks/gpu_bare_steps.py`) are counted in the same way. They compute
what the row names, with Keras's layers and TensorFlow's fused optimizers. The bare step has one
constant batch, and metrics only in an evaluation. The bare loop also gathers the batch from arrays
on the device, and adds up loss and accuracy, as ddl does. Neither looks for NaN.
"""

from collections.abc import Callable, Iterator
from typing import Any

from benchmarks import command
from benchmarks.gpu_rows import MOST_KERNELS, ROWS, Row, network
from benchmarks.report import Bar, Report, Table

MOST = 15
"""Elements that a tensor in host memory may have; a microbatch has more."""
WORSE = 1.2
"""The most operations of an update, relative to those of its bare loop."""

_QUICK = tuple(row for row in ROWS if row.network == "MLP" and row.change in ("", "mixed_float16"))


def measure(quick: bool) -> Iterator[Report]:
    """Traces one row after the other; yields what is counted so far."""
    from ddl.distribution import configure_devices

    configure_devices(4, gpus=())
    counted: list[list[Any]] = []
    bars: list[Bar] = []
    firsts: dict[str, int] = {}
    for row in _QUICK if quick else ROWS:
        update = update_of(row)
        step, loop = (bare_steps_of(row, gathers).operations for gathers in (False, True))
        first = firsts.setdefault(row.network, update.operations)
        added = "\u2013" if row.evaluates else update.operations - first
        ratios = [round(update.operations / bare, 2) for bare in (step, loop)]
        crossing, on_host = sum(update.crossing.values()), len(update.on_host)
        own = [update.operations - update.library_calls, update.library_calls]
        compared = [step, ratios[0], loop, ratios[1]]
        counted.append([str(row), update.operations, *own, added, *compared, crossing, on_host])
        bars.append(Bar(f"{row}: operations / the bare loop's", ratios[1], WORSE, "at most"))
        if (most := MOST_KERNELS.get(str(row))) is not None:
            bars.append(Bar(f"{row}: kernels, without library calls", own[0], most, "at most"))
        columns = [
            "",
            "operations",
            "kernels",
            "library calls",
            "added",
            "bare step",
            "ratio",
            "bare loop",
            "ratio",
        ]
        columns += ["bytes across", "left to the host"]
        yield Report([Table("An update", columns, [*counted])], [*bars])


def update_of(row: Row) -> Any:
    """Traces a trainer on the second CPU device and those after it; see `tests.gpu.updates`."""
    import ddl
    from ddl.distribution.path import taking
    from tests.gpu.places import of_gpus
    from tests.gpu.updates import evaluation_of, update_of

    strategy = _strategy(row)
    with taking(of_gpus()):
        with strategy.scope():
            task, data = _task(row)
            trainer = ddl.Trainer(
                task,
                _optimizer(row.optimizer),
                data,
                global_batch_size=row.batch,
                strategy=strategy,
                **({"eval_data": data} if row.evaluates else {}),
                **_called(row.arguments),
            )
        return (evaluation_of if row.evaluates else update_of)(trainer, MOST)


def _optimizer(name: str) -> Any:
    import keras

    import ddl

    module = ddl.optimizers if name in ddl.optimizers.__all__ else keras.optimizers
    return getattr(module, name)(1e-3)


def bare_steps_of(row: Row, gathers: bool) -> Any:
    """Traces the bare step of a row in a loop; see `tests.gpu.updates`.

    Args:
      row: The row.
      gathers: Whether batches are gathered, and right answers counted.
    """
    import tensorflow as tf

    from benchmarks.gpu_bare_steps import step_of
    from tests.gpu.updates import DEVICE, HOST, count

    strategy = _strategy(row)
    with strategy.scope():
        step, arrays = step_of(row, gathers)
    rows = row.batch // row.replicas

    def on_replica(own: Any) -> Any:
        images, labels, order = own
        if gathers:
            images, labels = tf.gather(images, order), tf.gather(labels, order)
        return step(images[:rows], labels[:rows])

    @tf.function(autograph=False)
    def loop(images: tf.Tensor, labels: tf.Tensor, order: tf.Tensor) -> tf.Tensor:
        def turn(number: tf.Tensor, total: tf.Tensor) -> Any:
            with tf.device(DEVICE):
                own = images, labels, order[number]
            figures = strategy.run(on_replica, args=(own,))
            with tf.device(HOST):
                number += 1
            with tf.device(DEVICE):
                if row.evaluates or gathers:
                    return number, total + strategy.reduce("SUM", figures, axis=None)
                return number, strategy.experimental_local_results(figures)[0]

        def goes_on(number: tf.Tensor, _: tf.Tensor) -> tf.Tensor:
            with tf.device(HOST):
                return number < 10

        zeros = tf.zeros([2] if row.evaluates or gathers else [])
        return tf.while_loop(goes_on, turn, (tf.constant(0), zeros))[1]

    images, labels = (tf.constant(a) for a in arrays)
    order = tf.zeros([10, rows], tf.int64)
    graph = loop.get_concrete_function(images, tf.cast(labels, tf.int64), order).graph
    return count(graph, MOST, row.arguments.get("accumulation_steps", 1))


def _strategy(row: Row) -> Any:
    """Sets the precision, and returns the strategy of a row."""
    import keras
    import tensorflow as tf

    from ddl.precision import set_precision
    from tests.gpu.updates import DEVICE

    keras.utils.clear_session()  # also of its precision
    set_precision(row.precision)
    if row.replicas == 1:
        return tf.distribute.OneDeviceStrategy(DEVICE)
    return tf.distribute.MirroredStrategy([f"CPU:{1 + i}" for i in range(row.replicas)])


def _called(arguments: dict[str, Any]) -> dict[str, Any]:
    called: Callable[[Any], Any] = lambda value: value() if callable(value) else value  # noqa: E731
    return {name: called(value) for name, value in arguments.items()}


def _task(row: Row) -> tuple[Any, dict[str, Any]]:
    """Returns the task and its data."""
    import ddl
    from benchmarks.gpt import NextToken

    model, (images, labels) = network(row)
    data = {"image": images, "label": labels}
    if row.network == "GPT":
        return NextToken(model), data
    return ddl.Classification(model, **_called(row.task)), data


if __name__ == "__main__":
    command.main(measure)
