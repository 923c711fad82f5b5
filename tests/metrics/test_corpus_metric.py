"""Functions of all outputs: what they get, and their names."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.errors import ConfigError
from ddl.metrics import CorpusMetric
from tests.conftest import make_strategy

N = 21
DATA = {"x": np.arange(3 * N, dtype="f4").reshape(N, 3), "place": np.arange(N)}


class Pairs:
    def __init__(self):
        self.model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])

    def per_example(self, features, training):
        return ddl.PerExample(tf.reduce_sum(self.model(features["x"], training=training) ** 2, 1))

    def predict(self, features):
        return {"sum": tf.reduce_sum(features["x"], 1), "out": self.model(features["x"])}


def trainer_of(metrics, replicas=1, task=Pairs, data=None, **options):
    strategy = make_strategy("mirrored" if replicas > 1 else "one_device", replicas)
    with strategy.scope():
        task = task()
    data = DATA if data is None else data
    given = {"train_data": data, "eval_data": data, "global_batch_size": 8, **options}
    return ddl.Trainer(task, "sgd", strategy=strategy, corpus_metrics=metrics, **given)


def checked(outputs, features):
    """All rows, in order, once; of the weights that the evaluation uses."""
    assert set(outputs) == {"sum", "out"}
    assert set(features) == {"x", "place"}
    np.testing.assert_array_equal(features["place"], DATA["place"])
    np.testing.assert_array_equal(outputs["sum"], DATA["x"].sum(1))
    return {"rows": len(outputs["out"]), "mean": outputs["out"].mean()}


@pytest.mark.parametrize("replicas", [1, 2])
def test_all_rows_in_order_without_padding(replicas):
    trainer = trainer_of([CorpusMetric(checked, ["rows", "mean"])], replicas)
    assert trainer.eval_metric_names == ("loss", "rows", "mean")
    found = trainer.evaluate()
    assert found["rows"] == N
    assert found["mean"] == pytest.approx(trainer.predict(DATA)["out"].mean(), rel=1e-6)
    assert trainer.history[-1]["rows"] == N
    assert trainer.evaluate(DATA)["rows"] == N


@pytest.mark.parametrize("features", [["place"], ["place", "weight"]])
def test_rows_of_weight_0_are_left_out(features):
    weight = np.tile([0.0, 0.5, 2.0], N // 3).astype("f4")

    def rows(outputs, features):
        np.testing.assert_array_equal(features["place"], np.flatnonzero(weight))
        np.testing.assert_array_equal(outputs["sum"], DATA["x"].sum(1)[weight > 0])
        if "weight" in features:
            np.testing.assert_array_equal(features["weight"], weight[weight > 0])
        return {"rows": len(outputs["sum"]), "features": len(features)}

    metric = CorpusMetric(rows, ["rows", "features"], features=features)
    trainer = trainer_of(metric, data={**DATA, "weight": weight})
    found = trainer.evaluate()
    assert (found["rows"], found["features"]) == (N // 3 * 2, len(features))


def test_a_figure_of_the_task_is_not_overwritten():
    with pytest.raises(ConfigError, match="figures are called 'loss'|names of ddl's own: loss"):
        trainer_of(CorpusMetric(checked, ["loss"]))
    metrics = [CorpusMetric(checked, ["rows"]), CorpusMetric(checked, ["rows"])]
    with pytest.raises(ConfigError, match="Two figures are called 'rows'"):
        trainer_of(metrics)
