"""The callback WorstExamples: its choice of examples, on several replicas and with padding."""

import types

import keras
import numpy as np
import pytest

import ddl
from ddl.callbacks import WorstExamples
from ddl.callbacks.moment import Media
from ddl.callbacks.worst_examples import worst
from ddl.errors import ConfigError
from tests.conftest import make_strategy

rng = np.random.default_rng(0)
DATA = {
    "image": rng.integers(0, 256, (21, 4, 4, 1), np.uint8),
    "label": rng.integers(0, 3, 21),
}


def make_trainer(place=("one_device", 1), eval_data=DATA):
    keras.utils.set_random_seed(1)
    strategy = make_strategy(*place)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((4, 4, 1)),
                keras.layers.Rescaling(1 / 255),
                keras.layers.Flatten(),
                keras.layers.Dense(3),
            ]
        )
        task = ddl.Classification(model)
        return ddl.Trainer(
            task, keras.optimizers.SGD(0.1), DATA, eval_data=eval_data, global_batch_size=8
        )


class Written:
    def __init__(self):
        self.values = {}

    def write_media(self, step, split, kind, name, value):
        self.values[kind] = value


@pytest.mark.parametrize("place", [("one_device", 1), ("mirrored", 2)], ids=str)
def test_the_highest_losses_are_written_with_their_places_and_pictures(place):
    trainer, written = make_trainer(place), Written()
    logits = np.asarray(trainer.model(DATA["image"]), np.float64)
    label = DATA["label"]
    losses = np.log(np.exp(logits).sum(1)) - logits[np.arange(len(label)), label]
    callback = WorstExamples(5)
    callback.check(trainer)
    write = Media(written, 0, "eval", "WorstExamples")
    callback.function(types.SimpleNamespace(trainer=trainer, write=write))
    expected = np.argsort(-losses)[:5]
    rows = [row.strip("| ").split(" | ") for row in written.values["text"].splitlines()[2:]]
    assert [int(place) for place, _ in rows] == expected.tolist()
    assert [float(loss) for _, loss in rows] == pytest.approx(losses[expected], rel=1e-4)
    np.testing.assert_array_equal(written.values["image"], DATA["image"][expected])


def test_no_number_is_the_highest_and_weight_0_is_left_out():
    losses = np.array([1.0, np.nan, 3.0, 9.0, 3.0])
    weights = np.array([1.0, 1.0, 1.0, 0.0, 1.0])
    assert worst(losses, weights, 3).tolist() == [1, 2, 4]
    assert worst(losses, weights, 9).tolist() == [1, 2, 4, 0]


def test_refusals():
    with pytest.raises(ConfigError, match=r"number must be an integer ≥ 1, got 0"):
        WorstExamples(0)
    weighted = {**DATA, "weight": np.ones(21, np.float32)}
    with pytest.raises(ConfigError, match=r"feature 'weight'. Evaluate on data without it"):
        WorstExamples().check(make_trainer(eval_data=weighted))
    with pytest.raises(ConfigError, match=r"there is no data to evaluate on"):
        WorstExamples().check(make_trainer(eval_data=None))
