"""Values of an update as arrays. Without TensorFlow."""

import numpy as np

from ddl.checking.recording import AFTER, Key, Part, Recording
from ddl.replay.recorded import Recorded
from ddl.replay.values import arrays_of


def recorded(*moves):
    """Two steps; each variable has the path "net/kernel", another shape, and moves so far."""
    recording = Recording()
    for step in (0, 1):
        for position, moved in enumerate(moves):
            value = np.full(position + 1, 100 * position + step * moved, np.float32)
            key = Key(step, AFTER, 0, position, "weights", "net/kernel")
            recording.add(key, Part(0, 0, value))
    return Recorded(recording, {})


def test_variables_of_one_path_are_told_apart():
    """Such as those of two models of one class."""
    found = arrays_of(recorded(0.5, 0.0, -2.0), 1, ["update"])
    names = [f"update/weights/net/kernel{suffix}" for suffix in ("", " (2)", " (3)")]
    assert list(found) == names
    for name, expected in zip(names, ([0.5], [0, 0], [-2, -2, -2]), strict=True):
        np.testing.assert_array_equal(found[name], expected)
