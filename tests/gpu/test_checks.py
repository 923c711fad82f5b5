"""The suite's own code, tried on CPU devices: its figures are tested elsewhere."""

import contextlib
import json

import pytest
import tensorflow as tf

from ddl.distribution.path import taking
from tests.conftest import make_strategy
from tests.gpu import suite
from tests.gpu.checks import CHECKS, SMALL, Finding
from tests.gpu.places import Place, of_gpus

PLACE = Place("one", on_cpu=True)


# The other checks trace what other tests trace.
@pytest.mark.parametrize("name", ["arithmetic", "overflow", "snapshots"])
def test_checks(name):
    with taking(of_gpus()):
        findings = [*CHECKS[name](PLACE, make_strategy("one_device", 1), SMALL)]
    assert findings
    assert not [finding for finding in findings if not finding.is_good]


def test_a_check_sees_a_difference(monkeypatch):
    monkeypatch.setattr(
        tf, "matmul", lambda a, b: tf.tensordot(a, b, 1) * (1 + 1e-3 * (a.dtype == tf.float32))
    )
    findings = [*CHECKS["arithmetic"](PLACE, make_strategy("one_device", 1), SMALL)]
    (bad,) = [finding for finding in findings if not finding.is_good]
    assert bad.what.startswith("product in float32")
    assert bad.value == pytest.approx(1e-3, rel=0.01)


def test_what_is_found_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(Place, "strategy", lambda self: taking_one())

    def good(*_):
        yield Finding("number", 1.0, 2)
        yield Finding("of no limit", 9.0)

    def bad(*_):
        yield Finding("not a number", float("nan"), 2)

    def failing(*_):
        yield Finding("before", 1.0)
        raise RuntimeError("what happened")

    file = tmp_path / "results" / "one.json"
    assert suite.run(PLACE, {"good": good}, SMALL, file)
    assert not suite.run(PLACE, {"good": good, "bad": bad, "failing": failing}, SMALL, file)
    found = json.loads(file.read_text())["checks"]
    assert {name: check["good"] for name, check in found.items()} == {
        "good": True,
        "bad": False,
        "failing": False,
    }
    assert "what happened" in found["failing"]["error"]
    assert found["failing"]["findings"][0]["value"] == 1
    assert "not a number: nan, at most 2" in suite.summary(found["bad"])


def taking_one():
    return contextlib.nullcontext(make_strategy("one_device", 1))


def test_a_check_begins_only_within_the_time(tmp_path, monkeypatch):
    monkeypatch.setattr(Place, "strategy", lambda self: taking_one())
    monkeypatch.setattr(suite, "_SECONDS", -1)
    assert not suite.run(PLACE, {"late": lambda *_: iter(())}, SMALL, tmp_path / "one.json")
    (found,) = json.loads((tmp_path / "one.json").read_text())["checks"].values()
    assert found["error"].startswith("not run")
