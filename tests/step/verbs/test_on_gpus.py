"""Steps of one's own on the GPU's path of batches and gradients, on virtual CPU devices."""

import dataclasses

import numpy as np
import pytest

from ddl.distribution import path as device_path
from tests.conftest import LikeGpus
from tests.step.verbs.own_steps import build, copies
from tests.step.verbs.test_update import STEPS, on_one_device

pytestmark = pytest.mark.usefixtures("rows_checked_on_one_device")


@pytest.mark.parametrize(("name", "microbatches"), [("Centered", 2)])
def test_two_devices_end_as_one(name, microbatches):
    """Branches, an average, a mean, own variables and two optimizers, with padding."""
    figures, values = on_one_device(name)
    with device_path.taking(dataclasses.replace(device_path.GPU, compiles=False)):
        trainer = build(name, LikeGpus(2), clip_norm=0.5, accumulation_steps=microbatches)
        ours = trainer.train(STEPS)
    assert ours == pytest.approx(figures, abs=1e-10)
    for all_copies, value in zip(copies(trainer), values, strict=True):
        for copy in all_copies:
            np.testing.assert_allclose(copy, value, rtol=0, atol=1e-10)
