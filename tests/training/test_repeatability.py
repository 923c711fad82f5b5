"""Two equal runs in fresh processes end with the same bits, whatever else the machine does."""

import json
import os
import subprocess
import sys

import pytest

from tests.run.whole_runs import ROOT
from tests.training.repeated_runs import CASES

# Occupies memory in odd sizes first, so that tensors come to lie elsewhere.
_DISTURBED = """
import sys
kept = [bytearray(37 * number) for number in range(1, 4000)]
del kept[::3]
from tests.training.repeated_runs import main
main(*sys.argv[1:])
"""


def start(program: list[str], *arguments: str, **environment: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, *program, *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    )


def digests(process: subprocess.Popen) -> dict[str, str]:
    output, _ = process.communicate(timeout=1800)
    assert process.returncode == 0
    return json.loads(output.splitlines()[-1])


@pytest.mark.slow
def test_each_feature_of_the_trainer_repeats():
    """Two processes at once disturb each other.

    One has its memory laid out differently and has more threads than cores between operations, so
    that the order of the operations varies. Each process has its own seed of Python's hashes.
    """
    plain = start(["-m", "tests.training.repeated_runs"])
    disturbed = start(["-c", _DISTURBED], TF_NUM_INTEROP_THREADS="8")
    try:
        expected, found = digests(plain), digests(disturbed)
    finally:
        for process in (plain, disturbed):
            process.kill()
            process.wait()
    assert not [case for case, digest in expected.items() if found[case] != digest]
    assert len(expected) == sum(len(case.strategies) for case in CASES.values())
