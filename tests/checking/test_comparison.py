"""The comparison of recordings made by hand, and the causes that rules find."""

import numpy as np
import pytest

from ddl.checking.causes import Case, cause_of
from ddl.checking.comparison import Found, compare
from ddl.checking.configurations import ALL, ONE, RESUMED, WRITER, Configuration
from ddl.checking.recording import Failure, Key, Layer, Part, Recording
from ddl.checking.report import ComputationDiffers, report_on

ROWS = np.arange(8.0) + 1
WEIGHT = np.array([1.0, 1, 1, 1, 1, 0, 0, 0])


def key(stage, name="it", update=0, call=1, position=1) -> Key:
    return Key(update, call, 0, position, stage, name)


def split(value, parts) -> list[Part]:
    """The parts of a batch on as many replicas."""
    pieces = np.split(np.asarray(value), parts)
    return [Part(r, r * len(piece), piece) for r, piece in enumerate(pieces)]


def whole(value, replicas=1) -> list[Part]:
    return [Part(replica, 0, np.asarray(value)) for replica in range(replicas)]


def recording(parts=1, loss=ROWS, gradient=0.5, weight=None, **arguments) -> Recording:
    """A run of three updates."""
    values = {}
    for update in range(3):
        mask = WEIGHT if update == 2 else np.ones(8)
        values[key("rows", "weight", update)] = split(mask if weight is None else weight, parts)
        values[key("layer", "dense", update, position=2)] = split(2 * ROWS[:, None], parts)
        values[key("loss", "task", update, position=3)] = split(loss, parts)
        values[key("gradients", "kernel", update, 1)] = whole([gradient, 1e-17], parts)
        values[key("weights", "kernel", update, 9)] = whole([1.0], parts)
    return Recording(values=values, batch_size=8, **arguments)


def first(*, stage, size=None, parts=2, exact=False, **changes):
    other = recording(parts, **changes)
    found = compare(recording(parts if exact else 1), other, exact).found
    assert found is not None
    assert found.key.stage == stage
    return found


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_parts_of_a_batch_are_joined(parts):
    result = compare(recording(), recording(parts))
    assert result.found is None
    assert result.values == 15


def test_rounding_passes_and_more_does_not():
    assert compare(recording(), recording(2, loss=ROWS * (1 + 1e-13))).found is None
    found = first(stage="loss", loss=ROWS * (1 + 1e-6))
    assert 1e-7 < found.size < 1e-5
    assert found.key.update == 0
    assert found.ratio == pytest.approx(1 + 1e-6)


def test_padding_does_not_count():
    loss = np.where(WEIGHT > 0, ROWS, -ROWS)
    same = recording(2)
    same.values[key("loss", "task", 2, position=3)] = split(loss, 2)
    assert compare(recording(), same).found is None
    same.values[key("loss", "task", 1, position=3)] = split(loss, 2)
    found = compare(recording(), same).found
    assert (found.key.update, found.row, found.got) == (1, 7, -8.0)


def test_nan_equals_nan():
    nan = ROWS * np.nan
    assert compare(recording(loss=nan), recording(2, loss=nan)).found is None
    assert first(stage="loss", loss=nan).size == np.inf


def test_a_resumed_run_must_equal_to_the_bit():
    made = {k: v for k, v in recording(2).values.items() if k.update == 2}
    resumed = Recording(values=made, batch_size=8)
    assert compare(recording(2), resumed, exact=True).found is None
    made[key("weights", "kernel", 2, 9)] = whole([np.nextafter(1.0, 2)], 2)
    assert compare(recording(2), resumed, exact=True).found.key.stage == "weights"


# ------------------------------------------------------------ causes


def named(stage, facts=(), layer=None, only_padded=False, configuration=WRITER, **found):
    run = Recording(layers={"it": layer} if layer else {})
    for kind in facts:
        run.note_fact(kind, f"{kind}.py:1")
    values = {"size": 1.0, "expected": 1.0, "got": 2.0} | found
    case = Case(Found(key(stage), **values), configuration, run, only_padded)
    cause, evidence = cause_of(case)
    return cause.name, evidence


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        ({"stage": "rows"}, "data"),
        ({"stage": "layer", "layer": Layer("Dropout", draws=True)}, "draw by replica"),
        ({"stage": "layer", "facts": ["draw"]}, "draw by replica"),
        ({"stage": "loss", "facts": ["numpy_draw"]}, "draw by replica"),
        (
            {"stage": "layer", "layer": Layer("BatchNormalization", normalizes=True)},
            "moments of a replica",
        ),
        ({"stage": "loss", "facts": ["all_reduce"]}, "second all-reduce"),
        ({"stage": "loss", "facts": ["num_replicas"]}, "division by the number of replicas"),
        ({"stage": "loss", "facts": ["replica_id"]}, "depends on the replica"),
        ({"stage": "loss", "ratio": 2.0}, "mean over the replica"),
        ({"stage": "loss"}, "across examples"),
        ({"stage": "loss", "only_padded": True}, "padding counted"),
        ({"stage": "gradients", "facts": ["clip"]}, "clip before the reduce"),
        ({"stage": "gradients", "ratio": 2.0}, "second all-reduce"),
        ({"stage": "gradients", "ratio": 0.5}, "division by the number of replicas"),
        ({"stage": "gradients", "only_padded": True}, "padding counted"),
        ({"stage": "gradients", "facts": ["own_loss"]}, "layer losses"),
        ({"stage": "applied gradients"}, "step"),
        ({"stage": "updated weights"}, "optimizer"),
        ({"stage": "own variables"}, "state of a replica"),
        ({"stage": "weights", "configuration": RESUMED}, "not in the checkpoint"),
        ({"stage": "layer", "is_missing": True}, "other computation"),
    ],
)
def test_causes(arguments, cause):
    assert named(**arguments)[0] == cause


# ------------------------------------------------------------ report


def all_runs(**changes) -> dict[Configuration, Recording]:
    runs = {one: recording(one.parts) for one in ALL}
    runs[RESUMED].values = {k: v for k, v in runs[WRITER].values.items() if k.update == 2}
    return runs | changes


def test_a_report_of_equal_runs():
    report = report_on(all_runs())
    assert report.same
    report.raise_if_different()
    assert "computes the same everywhere. 80 values were compared" in str(report)
    assert list(report.checked) == list(ALL)


def test_a_report_names_the_earliest_difference_first():
    runs = all_runs()
    runs[Configuration(1, 2)] = recording(2, gradient=1.0)
    runs[Configuration(4, 1)] = recording(4, loss=4 * ROWS)
    report = report_on(runs)
    assert [d.stage for d in report.differences] == ["loss", "gradients"]
    first, other = report.differences
    assert first.configuration == Configuration(4, 1)
    assert first.cause.name == "mean over the replica"
    assert other.update == 1
    text = str(report)
    assert "4 replicas × 1 microbatch, update 1: the loss of each example, task" in text
    assert "got 32 in row 7, where 1 replica × 1 microbatch gives 8" in text
    with pytest.raises(ComputationDiffers, match="mean over the replica"):
        report.raise_if_different()


def test_a_refusal_and_an_error_are_differences():
    runs = all_runs()
    runs[ONE] = Recording(failure=Failure("Do not.", is_refusal=True))
    (only,) = report_on(runs).differences
    assert (only.stage, only.message) == ("start", "Do not.")
    runs = all_runs()
    error = "You must specify an aggregation method to update a variable in Replica Context."
    runs[WRITER] = Recording(failure=Failure(error, is_refusal=False))
    runs[RESUMED] = Recording()
    (only,) = report_on(runs).differences
    assert (only.stage, only.cause.name) == ("run", "state of a replica")
