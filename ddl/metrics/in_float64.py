"""Keras metrics that compute in float64, apart from strategies and graphs."""

import concurrent.futures
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import keras

from ddl.errors import ConfigError, did_you_mean

_T = TypeVar("_T")
_FLOATX = threading.RLock()


@contextmanager
def float64_by_default() -> Iterator[None]:
    """Makes float64 Keras's default dtype within the `with` block.

    Keras's AUC and R2Score keep their state in the default dtype, whatever `dtype` they are given,
    and its accuracies count in it.
    """
    with _FLOATX:
        earlier = keras.config.floatx()
        keras.config.set_floatx("float64")
        try:
            yield
        finally:
            keras.config.set_floatx(earlier)


def alone(function: Callable[[], _T]) -> _T:
    """Calls a function eagerly, outside of all strategies and graphs, in float64."""

    def call() -> _T:
        with float64_by_default():
            return function()

    # A new thread has no strategy and no graph. Only in a thread: a strategy would make a copy of
    # each variable for each replica.
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(call).result()


def maker_of(
    metric: str | keras.metrics.Metric, arguments: Mapping[str, Any]
) -> Callable[[], keras.metrics.Metric]:
    """Returns a function that makes a Keras metric in float64; call it in `alone`.

    Args:
      metric: Name of a metric of Keras, or a metric whose class and config are taken.
      arguments: Arguments of its class, for a name.

    Raises:
      ConfigError: If the name is unknown, or a metric cannot be made from its config.
    """
    if isinstance(metric, str):
        kind = _class_named(metric)
        return lambda: kind(**{**arguments, "dtype": "float64"})
    config = {**metric.get_config(), "dtype": "float64"}
    return lambda: type(metric).from_config(dict(config))


def _class_named(name: str) -> type[keras.metrics.Metric]:
    found: Any = None
    known = {key: one for key, one in vars(keras.metrics).items() if _is_metric(one)}
    try:
        found = type(alone(lambda: keras.metrics.get(name)))
    except TypeError:  # a metric with required arguments, which only its own name finds
        found = known.get(name) or {key.lower(): one for key, one in known.items()}.get(
            name.replace("_", "").lower()
        )
    except ValueError:
        pass
    if not _is_metric(found):
        raise ConfigError(
            f"KerasMetric.metric must be the name of a metric of Keras, such as 'AUC' or 'F1Score',"
            f" or a Keras metric, got {name!r}. Correct the name.{did_you_mean(name, list(known))}"
        )
    return found


def _is_metric(found: Any) -> bool:
    return isinstance(found, type) and issubclass(found, keras.metrics.Metric)
