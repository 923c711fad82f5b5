"""The chief's watch over the tasks of its cluster."""

import sys

import pytest

from ddl.distribution.cluster import ClusterTimeouts
from ddl.training.asynchronous import watch


class Ended(Exception):
    pass


@pytest.mark.parametrize(
    ("kind", "answers", "told"),
    [
        (
            "worker",
            ["greets", "refuses", "refuses", "greets"],
            ["Worker 0 at a:1 is lost.", "is back."],
        ),
        ("worker", ["greets", "is silent"], ["Worker 0 at a:1 is silent since 51 s"]),
        ("worker", ["greets", "is unreachable"], ["Worker 0 at a:1 is unreachable since 31 s"]),
        (
            "ps",
            ["greets", "refuses"],
            ["Parameter server 0 at a:1 refuses since 6 s"],
        ),
        ("ps", ["greets", "is silent", "greets"], []),
    ],
)
def test_who_is_missed(monkeypatch, capsys, kind, answers, told):
    """Two workers; the last answer stays. Each look takes a second."""
    clock, script = [0.0], iter(answers)
    last = answers[-1]

    def look(seconds):
        clock[0] += seconds
        if clock[0] > 60:
            raise Ended

    def end(why):
        print(why, file=sys.stderr)
        raise Ended

    monkeypatch.setattr(watch, "ask", lambda *arguments: next(script, last))
    monkeypatch.setattr(watch.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(watch.time, "sleep", look)
    monkeypatch.setattr(watch, "_end", end)
    with pytest.raises(Ended):
        watch._watch(kind, 0, "a:1", set(), 2, ClusterTimeouts(peer=30, stall=50))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(told)
    for line, text in zip(lines, told, strict=True):
        assert text in line


def test_no_worker_left_ends_all(monkeypatch):
    ended = []
    monkeypatch.setattr(watch, "ask", lambda *arguments: "refuses")
    monkeypatch.setattr(watch, "_PAUSE", 0.01)

    def end(why):
        ended.append(why)
        raise Ended

    monkeypatch.setattr(watch, "_end", end)
    with pytest.raises(Ended):
        watch._watch("worker", 0, "a:1", set(), 1, ClusterTimeouts(peer=1e-9, stall=1e-9))
    assert "Worker 0 at a:1 refuses since" in ended[0]
