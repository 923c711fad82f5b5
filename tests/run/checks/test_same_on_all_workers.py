"""Workers whose flags, code or config differ from the chief's."""

import pytest

from ddl.errors import ConfigError
from ddl.run.checks.same_on_all_workers import check_same_on_all


class TwoWorkers:
    """The chief, and another one whose text differs as `change` says."""

    number = 2

    def __init__(self, change):
        self.change = change
        self.barriers = 0

    def barrier(self):
        self.barriers += 1

    def gather_texts(self, text):
        return [text, self.change(text)]


def test_flags_that_decide_what_they_do_together_are_compared():
    flags = {"mode": "train", "dry_run": False}
    check_same_on_all(TwoWorkers(lambda text: text), flags)
    other = TwoWorkers(lambda text: text.replace("--mode=train", "--mode=eval"))
    with pytest.raises(ConfigError) as raised:
        check_same_on_all(other, flags)
    assert other.barriers == 1  # none ends while another still waits for the texts
    first, *differences, last = str(raised.value).splitlines()
    assert first == "Worker 1 must have the code, versions, config and flags of worker 0, got"
    assert last == "Start all workers with the same ones."
    assert sorted(differences) == ["  worker 0: --mode=train", "  worker 1: --mode=eval"]
