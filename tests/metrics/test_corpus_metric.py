"""Functions of all outputs: what they get, and their names."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.errors import ConfigError
from ddl.metrics import CorpusMetric
from tests.contract.builders import make_trainer

N = 21
DATA = {"x": np.arange(3 * N, dtype="f4").reshape(N, 3), "place": np.arange(N)}


class Pairs:
    def __init__(self):
        self.model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])

    def per_example(self, features, training):
        loss = tf.reduce_sum(self.model(features["x"], training=training) ** 2, 1)
        return ddl.PerExample(loss, {"norm": loss})

    def predict(self, features):
        return {"sum": tf.reduce_sum(features["x"], 1), "out": self.model(features["x"])}


def trainer_of(metrics, data=DATA, **options):
    options = {"eval_data": data, "policy": "float32", "corpus_metrics": metrics, **options}
    return make_trainer((Pairs, keras.optimizers.SGD), data, **options)


def checked(outputs, features):
    """All rows, in order, once; of the weights that the evaluation uses."""
    assert set(outputs) == {"sum", "out"}
    assert set(features) == {"x", "place"}
    np.testing.assert_array_equal(features["place"], DATA["place"])
    np.testing.assert_array_equal(outputs["sum"], DATA["x"].sum(1))
    return {"rows": len(outputs["out"]), "mean": outputs["out"].mean()}


def test_all_rows_in_order_without_padding():
    trainer = trainer_of([CorpusMetric(checked, ["rows", "mean"])])
    assert trainer.eval_metric_names == ("loss", "norm", "rows", "mean")
    found = trainer.evaluate()
    assert found["rows"] == N
    assert found["mean"] == pytest.approx(trainer.predict(DATA)["out"].mean(), rel=1e-6)
    assert trainer.history[-1]["rows"] == N
    assert trainer.evaluate(DATA)["rows"] == N


def test_rows_of_weight_0_are_left_out():
    weight = np.tile([0.0, 0.5, 2.0], N // 3).astype("f4")

    def rows(outputs, features):
        np.testing.assert_array_equal(features["place"], np.flatnonzero(weight))
        np.testing.assert_array_equal(outputs["sum"], DATA["x"].sum(1)[weight > 0])
        if "weight" in features:
            np.testing.assert_array_equal(features["weight"], weight[weight > 0])
        return {f"features/{len(features)}": len(outputs["sum"])}

    read = ["place"], ["place", "weight"]
    metrics = [CorpusMetric(rows, [f"features/{len(one)}"], features=one) for one in read]
    found = trainer_of(metrics, data={**DATA, "weight": weight}).evaluate()
    assert found["features/1"] == found["features/2"] == N // 3 * 2


def test_a_figure_of_the_task_is_not_overwritten():
    with pytest.raises(ConfigError, match="names of ddl's own: loss"):
        CorpusMetric(checked, ["loss"])
    trainer = trainer_of(CorpusMetric(checked, ["norm"]), eval_data=None)
    with pytest.raises(ConfigError, match="Two figures are called 'norm'"):
        trainer.evaluate(DATA)
    metrics = [CorpusMetric(checked, ["rows"]), CorpusMetric(checked, ["rows"])]
    with pytest.raises(ConfigError, match="Two figures are called 'rows'"):
        trainer_of(metrics)
