"""Histograms of layers: their bins, and their counts on any number of replicas."""

import itertools
import json

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.errors import ConfigError
from ddl.figures import HISTOGRAM_LIMITS
from ddl.step.monitoring import LayerNorms
from ddl.step.monitoring.histograms import BINS, Histogram, counts_of
from tests.conftest import make_strategy
from tests.gpu.placement import on_host
from tests.step.monitoring.test_layer_norms import RATE, make_trainer

pytestmark = pytest.mark.usefixtures("rows_checked_on_one_device")


def numpy_counts(values):
    # numpy's last bin holds its right limit too, which is infinite here.
    return np.histogram(values, [-np.inf, *HISTOGRAM_LIMITS, np.inf])[0]


def counts(trainer):
    return {name: each.counts for name, each in trainer.layer_histograms.items()}


def test_bins_are_those_of_numpy_also_at_their_limits():
    draws = np.random.default_rng(0).normal(size=[40, 50]) * 10.0 ** np.arange(-25, 25)
    draws = np.concatenate([draws.ravel(), HISTOGRAM_LIMITS, [0.0, -0.0, np.inf, -np.inf]])
    for dtype in (np.float64, np.float32):
        found = tf.function(counts_of)(tf.constant(draws, dtype)).numpy()
        np.testing.assert_array_equal(found, numpy_counts(draws.astype(dtype)))
    assert counts_of(tf.constant([np.nan])).numpy()[-1] == 1


@pytest.mark.parametrize("dtype", [tf.float32, tf.float64], ids=str)
def test_a_gpu_counts_all(dtype):
    given = tf.TensorSpec([4096], dtype), tf.TensorSpec([], tf.int64)
    graph = tf.function(counts_of).get_concrete_function(*given).graph
    assert on_host(graph, most=8) == []


def test_bars_are_consecutive_and_hold_all_values():
    values = np.array([-3.0, 0.0, 0.25, 0.3, 2.0**20])
    bars = Histogram(numpy_counts(values)).bars()
    assert (bars[0].left, bars[0].right, bars[0].number) == (-4.0, -2.0, 1)
    assert (bars[-1].left, bars[-1].right, bars[-1].number) == (2.0**16, 2.0**17, 1)
    assert all(one.right == after.left for one, after in itertools.pairwise(bars))
    assert {bar[:2]: bar.number for bar in bars if bar.number}[0.25, 0.5] == 2
    assert sum(bar.number for bar in bars) == len(values) == Histogram(numpy_counts(values)).total
    assert Histogram(np.zeros(BINS)).bars() == []


def test_counts_are_those_of_the_weights_and_their_changes():
    trainer = make_trainer(layer_norms=LayerNorms(histogram_every=1))
    layers = {name: trainer.model.get_layer(name) for name in ("hidden", "head")}

    def weights():
        return {
            name: np.concatenate([v.numpy().ravel() for v in layer.trainable_variables])
            for name, layer in layers.items()
        }

    before = weights()
    trainer.train(1)
    after, found = weights(), counts(trainer)
    assert len(found) == 6
    for name in layers:
        moved = after[name] - before[name]
        for kind, values in (
            ("gradients", -moved / RATE),
            ("weights", before[name]),
            ("updates", moved),
        ):
            own = found[f"layer_{kind}/{name}"]
            np.testing.assert_array_equal(own, numpy_counts(values), err_msg=kind)


@pytest.fixture(scope="module")
def on_one_device():
    trainer = make_trainer(clip_norm=0.05, layer_norms=LayerNorms(histogram_every=2))
    found = []
    for steps in (1, 1, 4):
        trainer.train(steps)
        found.append(counts(trainer))
    return found


def test_every_second_update_is_counted_and_their_counts_add_up(on_one_device):
    first, second, later = on_one_device
    assert first == {}
    entries = {"hidden": 36 * 5 + 5, "head": 5 * 3 + 3}
    for name, own in second.items():
        assert own.sum() == entries[name.partition("/")[2]]
        assert later[name].sum() == 2 * own.sum()


@pytest.mark.parametrize(
    ("place", "arguments"),
    [
        (("mirrored", 2), {"accumulation_steps": 2}),
        (("mirrored", 2), {"shard_optimizer_state": True}),
        (("one_device", 1), {"jit_compile": "on"}),
    ],
    ids=str,
)
def test_are_equal_on_two_replicas_and_compiled(on_one_device, place, arguments):
    every_second = LayerNorms(histogram_every=2)
    trainer = make_trainer(place, clip_norm=0.05, layer_norms=every_second, **arguments)
    for expected, steps in zip(on_one_device, (1, 1, 4), strict=True):
        trainer.train(steps)
        found = counts(trainer)
        assert found.keys() == expected.keys()
        for name, own in expected.items():
            np.testing.assert_array_equal(found[name], own, err_msg=name)


def test_rows_that_no_example_uses_have_gradients_of_0_and_a_run_writes_the_counts(tmp_path):
    data = {"image": np.arange(24)[:, None] % 3, "label": np.arange(24) % 2}
    strategy = make_strategy("one_device", 1)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((1,), dtype="int64"),
                keras.layers.Embedding(100, 4, name="table"),
                keras.layers.Flatten(),
                keras.layers.Dense(2, name="head"),
            ]
        )
        trainer = ddl.Trainer(
            ddl.Classification(model),
            keras.optimizers.SGD(RATE),
            data,
            global_batch_size=24,
            strategy=strategy,
            layer_norms=LayerNorms(histogram_every=1),
        )
    trainer.train(1)
    found = counts(trainer)
    gradients, updates = found["layer_gradients/table"], found["layer_updates/table"]
    assert gradients.sum() == updates.sum() == 400
    assert gradients[BINS // 2] == updates[BINS // 2] == 97 * 4
    ddl.fit(trainer, tmp_path, train_steps=3, log_every=1, progress=False)
    rows = [json.loads(row) for row in (tmp_path / "histograms.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [2, 3]
    written = rows[-1]["layer_gradients/table"]
    assert sum(written["counts"]) == 400
    assert written["from"] < 0
    assert rows[-1].keys() == {"step", "epoch", "split", *found}


def test_refusals():
    for every in (0, -1, 2.0, True, "2"):
        with pytest.raises(ConfigError, match="LayerNorms.histogram_every must be a whole number"):
            LayerNorms(histogram_every=every)
    trainer = make_trainer()
    trainer.train(1)
    assert trainer.layer_histograms == {}
