"""The data of the sanity modes."""

import numpy as np
import tensorflow as tf

from ddl import config
from ddl.data import ArraySource
from ddl.data.pipeline import BatchPipeline
from ddl.run.sanity.rows import Rows, _first
from tests.conftest import make_strategy


def test_rows_repeat_up_to_a_length():
    like = ArraySource({"x": np.zeros((9, 2), "f4"), "label": np.zeros(9, "i4")})
    features = {"x": tf.reshape(tf.range(6.0), [3, 2]), "label": tf.constant([5, 6, 7])}
    rows = Rows({**features, "weight": tf.ones(3)}, 7, like)
    assert len(rows) == 7
    assert rows.element_spec == like.element_spec
    assert rows.classes is None
    np.testing.assert_array_equal(rows.gather(tf.constant([0, 2, 3, 6]))["label"], [5, 7, 5, 5])


def test_the_first_batch_is_that_of_the_run():
    source = ArraySource({"x": np.arange(10)})
    strategy = make_strategy("one_device", 1)
    rows = _first(source, 4, 4, strategy, seed=7, shuffle=True)
    pipeline = BatchPipeline(source, 4, seed=7, shuffle=True)
    batch = next(iter(source.batches(4, 0, seed=pipeline.order_seed, shuffle=True).take(1)))
    np.testing.assert_array_equal(rows["x"], batch["x"])
    assert sorted(rows["x"].numpy()) != [0, 1, 2, 3]


def test_a_replaced_value_is_taken_and_the_text_stays():
    config.load([], ["RunPlan.train_steps = 3", "RunPlan.retention = @Retention()"])
    assert config.replace_built("RunPlan", "train_steps", 5)
    assert not config.replace_built("RunPlan", "log_every", 5)
    assert config.build("RunPlan").train_steps == 5
    assert "RunPlan.train_steps = 3" in config.config_text()
    assert "RunPlan.train_steps = 3" in config.operative_config_text()
