"""Optimizers by name."""

import keras
import pytest
import tensorflow as tf

from ddl.errors import ConfigError
from ddl.optimizers.groups import from_keras_name


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([keras.optimizers.SGD()], r"got \[<keras.*a dict from a name to each"),
        (keras.optimizers.Adam, r"Call the class: Adam\(\.\.\.\)"),
        (None, "got None. Pass an instance"),
        ({"backbone": "sgd"}, r"Trainer.optimizer\['backbone'\] must be .* got 'sgd'"),
    ],
)
def test_what_is_no_optimizer_is_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        from_keras_name(given, tf.distribute.get_strategy())
