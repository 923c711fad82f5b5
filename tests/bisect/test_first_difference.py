"""The first recorded difference, its words, and runs that cannot be compared. No TensorFlow."""

from pathlib import Path

import numpy as np
import pytest

from ddl.bisect.configs import check_comparable, config_lines
from ddl.bisect.first_difference import Difference, first_difference
from ddl.bisect.search import Result
from ddl.bisect.text import lines
from ddl.checking.recording import AFTER, Key, Layer, Part, Recording
from ddl.errors import ConfigError
from ddl.replay.folder import Run
from ddl.replay.recorded import Recorded


def recorded(changes=None, *, extra_layer=False, further_draw=False, digests=None):
    """Two steps on two replicas; `changes` maps (step, stage, name, replica) to a summand."""
    values = {}
    for step in (4, 5):
        names = [("rows", "x"), ("layer", "first"), ("draw", "noisy/seed"), ("layer", "noisy")]
        names.append(("loss", "loss"))
        if further_draw:
            names.insert(3, ("draw", "noisy/seed"))
        if extra_layer:
            names.insert(2, ("layer", "extra"))
        for position, (stage, name) in enumerate(names):
            values[Key(step, 1, 0, position, stage, name)] = (2, 3)
        values[Key(step, 1, 0, 0, "own gradients", "first/kernel")] = (3,)
        values[Key(step, 2, 0, 0, "applied gradients", "first/kernel")] = (3,)
        values[Key(step, 2, 0, 0, "clipped gradients", "first/kernel")] = (3,)
        values[Key(step, 2, 0, 0, "updated slots", "momentum")] = (3,)
        values[Key(step, AFTER, 0, 0, "weights", "first/kernel")] = (3,)
    recording = Recording()
    recording.layers["noisy"] = Layer("Dropout", draws_by_position=True)
    for key, shape in values.items():
        for replica in (0, 1):
            rows = len(shape) == 2
            value = np.ones(shape, np.float32)
            change = (changes or {}).get((key.update, key.stage, key.name, replica), 0)
            value[-1] += change
            recording.add(key, Part(replica, 2 * replica if rows else 0, value))
    indices = {"index": np.array([70, 71, 72, 73]), "weight": np.ones(4)}
    return Recorded(recording, {4: {"": indices}, 5: {"": indices}}, digests or {})


def weights(step):
    return {(step, "weights", "first/kernel", replica): 1 for replica in (0, 1)}


def test_equal_runs():
    assert first_difference(recorded(), recorded()) is None


def test_the_first_value_of_the_first_step_that_ends_elsewhere():
    other = recorded({(5, "layer", "first", 1): 1, (5, "loss", "loss", 1): 1, **weights(5)})
    found = first_difference(recorded(), other)
    assert (found.step, found.stage, found.name) == (5, "activation", "first")
    assert (found.replicas, found.rows, found.examples) == ((1,), (3,), ((73, 73),))
    assert (found.expected, found.got, found.equal) == (1.0, 2.0, 1)
    text = "\n".join(lines(Result(4, 5, found, 3, ["verdict"])))
    assert "first in step 5: stage activation, first on replica 1 alone." in text
    assert "3 (example 73)" in text
    assert "Replays of both runs: 3.\nverdict" in text


def test_what_changes_no_weight_is_passed_over():
    assert first_difference(recorded(), recorded({(4, "layer", "first", 0): 1})) is None
    other = recorded({(4, "layer", "first", 0): 1, (5, "loss", "loss", 0): 1, **weights(5)})
    found = first_difference(recorded(), other)
    assert (found.step, found.stage) == (5, "loss")


@pytest.mark.parametrize(
    ("stage", "name", "called"),
    [
        ("rows", "x", "data"),
        ("layer", "noisy", "activation"),
        ("draw", "noisy/seed", "draw"),
        ("own gradients", "first/kernel", "gradient"),
        ("applied gradients", "first/kernel", "applied gradient"),
        ("clipped gradients", "first/kernel", "clipped gradient"),
        ("updated slots", "momentum", "slot"),
    ],
)
def test_stages(stage, name, called):
    other = recorded({(4, stage, name, 0): 1, (4, stage, name, 1): 1, **weights(4)})
    found = first_difference(recorded(), other)
    assert (found.stage, found.name, found.replicas) == (called, name, ())


def test_a_further_draw_of_a_layer_is_the_difference():
    other = {(4, "layer", "noisy", 0): 1, (4, "layer", "noisy", 1): 1, **weights(4)}
    found = first_difference(recorded(), recorded(other, further_draw=True))
    assert (found.stage, found.name) == ("draw", "noisy")
    other = {(4, "layer", "first", 0): 1, **weights(4)}
    found = first_difference(recorded(), recorded(other, further_draw=True))
    assert (found.stage, found.name) == ("activation", "first")


def test_a_state_beside_the_variables_is_named():
    """Two runs whose loss scales grow at other steps, which no variable of a step shows."""
    one = {"state/loss_scale": "1", "state/step": "4", "model/w": "2"}
    digests = {4: one, 5: {**one, "state/step": "5"}}
    other = {4: one | {"state/loss_scale": "7", "only": "1"}, 5: digests[5]}
    assert first_difference(recorded(digests=digests), recorded(digests=digests)) is None
    found = first_difference(recorded(digests=digests), recorded(weights(5), digests=other))
    assert (found.step, found.stage, found.name) == (4, "state", "state/loss_scale")
    text = "\n".join(lines(Result(3, 4, found, 2)))
    assert "first in step 4: stage state, state/loss_scale.\n  Of what a checkpoint holds" in text


def test_a_layer_that_one_run_alone_has_is_not_the_difference():
    """It moves the places of all values after it."""
    other = recorded({(5, "loss", "loss", 0): 1, **weights(5)}, extra_layer=True)
    found = first_difference(recorded(), other)
    assert (found.step, found.stage, found.is_missing) == (5, "loss", False)
    alone = first_difference(recorded(), recorded(weights(4), extra_layer=True))
    assert (alone.step, alone.name, alone.is_missing) == (4, "extra", True)


def test_words_without_a_difference():
    assert list(lines(Result(7, None, None, 0))) == ["The runs are the same up to step 7."]
    text = "\n".join(lines(Result(4, 8, None, 2)))
    assert "one of the steps 5 to 8" in text
    nan = float("nan")
    initial = Difference(0, "initial weight", "k", (), (), None, nan, nan, nan, False, 0)
    assert "before the first update" in next(lines(Result(0, 0, initial, 0)))


def run(name="a", reached=10, bindings=None, **metadata):
    return Run(Path(name), bindings or {}, {reached: metadata} if reached else {}, reached)


def test_runs_that_cannot_be_compared():
    check_comparable(run(global_batch_size=64), run(global_batch_size=64))
    check_comparable(run(global_batch_size=64), run())
    for name in ("global_batch_size", "num_examples", "batches_per_update"):
        with pytest.raises(ConfigError, match="must be the same in both runs.*got 64 in a and 32"):
            check_comparable(run(**{name: 64}), run("b", **{name: 32}))
    with pytest.raises(ConfigError, match="b has made no update"):
        check_comparable(run(), run("b", reached=0))


def test_configs_that_differ():
    one = run(bindings={"SEED": "1", "Trainer.clip_norm": "1.0"}, strategy="mirrored", replicas=2)
    other = run("b", bindings={"SEED": "2"}, strategy="one_device", replicas=1)
    assert list(config_lines(one, one)) == []
    found = list(config_lines(one, other))
    assert found[:2] == [
        "config: SEED = 1 → 2",
        "config: Trainer.clip_norm = 1.0 → (not bound)",
    ]
    assert found[2].startswith("devices: mirrored 2 → one_device 1.")
