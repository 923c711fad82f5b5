"""Devices, strategies, workers, parameter servers, and detection of lost peers.

The names below are imported on first use, so that the commands import this package without
TensorFlow.
"""

import importlib
from typing import Any

_HOME = {
    "Workers": "workers",
    "build_strategy": "strategies",
    "configure_devices": "devices",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'ddl.distribution' has no attribute {name!r}")
    return getattr(importlib.import_module(f"ddl.distribution.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return list(_HOME)
