"""The chief's watch over workers and parameter servers."""

import pytest

from ddl.distribution import parameter_servers
from ddl.distribution.cluster import ClusterTimeouts


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
        ("ps", ["greets", "refuses"], ["Parameter server 0 at a:1 refuses since 6 s"]),
        ("ps", ["greets", "is silent", "greets"], []),
    ],
)
def test_who_is_missed(monkeypatch, capsys, kind, answers, told):
    """Two workers; the last answer stays. Each look takes a second."""
    clock, script = [0.0], iter(answers)

    def look(seconds):
        clock[0] += seconds
        if clock[0] > 60:
            raise Ended

    def end(status):
        assert status == 77
        raise Ended

    monkeypatch.setattr(parameter_servers, "ask", lambda *arguments: next(script, answers[-1]))
    monkeypatch.setattr(parameter_servers.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(parameter_servers.time, "sleep", look)
    monkeypatch.setattr(parameter_servers.os, "_exit", end)
    with pytest.raises(Ended):
        parameter_servers._watch(kind, 0, "a:1", set(), 2, ClusterTimeouts(peer=30, stall=50))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(told)
    for line, text in zip(lines, told, strict=True):
        assert text in line
