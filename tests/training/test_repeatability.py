"""Two equal runs in fresh processes end with the same bits, whatever else the machine does."""

import json
import os
import subprocess
import sys

import pytest

from tests.run.whole_runs import ROOT

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
@pytest.mark.parametrize(
    ("name", "replicas"),
    [("one_device", 1), ("mirrored", 4), ("central_storage", 2)],
)
def test_each_feature_of_the_trainer_repeats(name, replicas):
    """One run has the machine to itself; the other shares it with a busy loop on each core.

    The other also has more threads than cores between operations, so that their order varies.
    """
    alone = digests(start(["-m", "tests.training.repeated_runs"], name, str(replicas)))
    loop = "import os; os.nice(10)\nwhile True: pass"  # other tests may run beside this one
    busy = [start(["-c", loop]) for _ in range(os.cpu_count() or 1)]
    try:
        threads = {"TF_NUM_INTEROP_THREADS": "8"}
        crowded = digests(start(["-c", _DISTURBED], name, str(replicas), **threads))
    finally:
        for process in busy:
            process.kill()
            process.wait()
    differing = [case for case, digest in alone.items() if crowded[case] != digest]
    assert not differing
    assert len(alone) == len(crowded) > 40
