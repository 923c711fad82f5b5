"""Devices, strategies, workers, parameter servers, and detection of lost peers.

The names below are imported on first use, so that the commands import this package without
TensorFlow.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddl.distribution.communication import Communication
    from ddl.distribution.devices import configure_devices, describe_devices
    from ddl.distribution.strategies import build_strategy
    from ddl.distribution.workers import Workers

_HOME = {
    "Communication": "communication",
    "Workers": "workers",
    "build_strategy": "strategies",
    "configure_devices": "devices",
    "describe_devices": "devices",
}

__all__ = ["Communication", "Workers", "build_strategy", "configure_devices", "describe_devices"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'ddl.distribution' has no attribute {name!r}")
    return getattr(importlib.import_module(f"ddl.distribution.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
