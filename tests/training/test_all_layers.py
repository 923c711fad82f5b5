"""Every layer of Keras: two equal trainings in fresh processes, under load, have the same bits."""

from collections import Counter

import pytest

from tests.training.layer_cases import CASES, LEFT_OUT, classes
from tests.training.test_repeatability import digests, start

# Occupies memory in odd sizes, and all cores, while it trains.
_DISTURBED = """
import os, subprocess, sys
from tests.training.layer_cases import main
kept = [bytearray(37 * number) for number in range(1, 4000)]
del kept[::3]
loop = f"import os; os.nice(19)\\nwhile os.getppid() == {os.getpid()}: pass"
busy = [subprocess.Popen([sys.executable, "-c", loop]) for _ in range(os.cpu_count())]
try:
    main()
finally:
    for one in busy:
        one.kill()
"""


def test_each_layer_class_of_keras_is_classified():
    """A new layer needs a case in tests/training/layer_cases.py, or a reason to leave it out."""
    known = [*CASES, *LEFT_OUT, *(name for case in CASES.values() for name in case.others)]
    assert sorted(known) == sorted(classes())
    assert max(Counter(known).values()) == 1
    assert all(LEFT_OUT.values())


@pytest.mark.slow
def test_each_layer_repeats_its_bits():
    """The number of threads is that of the run; when they run, and where tensors lie, is not."""
    threads = {"TF_NUM_INTRAOP_THREADS": "4", "TF_NUM_INTEROP_THREADS": "4"}
    plain = start(["-m", "tests.training.layer_cases"], **threads)
    disturbed = start(["-c", _DISTURBED], **threads)
    try:
        expected, found = digests(plain), digests(disturbed)
    finally:
        for process in (plain, disturbed):
            process.kill()
            process.wait()
    assert expected.keys() == CASES.keys()
    assert [name for name, digest in expected.items() if found[name] != digest] == []
