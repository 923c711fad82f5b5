"""What is said where there is no TPU. With one nothing has been run."""

import pytest

from ddl.distribution.tpu import build_tpu_strategy
from ddl.errors import DeviceError


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "found no TPU on this machine"),
        ("local", "found no TPU on this machine"),
        ("grpc://127.0.0.1:1", "did not answer"),
        ("of-the-cloud", "could not be looked up"),
    ],
)
def test_without_a_tpu(monkeypatch, name, message):
    monkeypatch.setenv("TPU_NAME", name)
    with pytest.raises(DeviceError, match=message):
        build_tpu_strategy(timeout=2.0)
