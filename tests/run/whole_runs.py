"""Runs of `ddl.main` in separate processes, and the comparison of their results."""

import json
from pathlib import Path

import numpy as np
import tensorflow as tf

from ddl.figures import is_measured

ROOT = Path(__file__).parents[2]
# A network that is traced soon, with all features of its config.
SMALL = ("cnn.blocks = ((8,),)", "cnn.hidden_units = (16,)")


def tensors(model_dir) -> dict[str, np.ndarray]:
    reader = tf.train.load_checkpoint(str(model_dir / "checkpoints"))
    names = [name for name in reader.get_variable_to_shape_map() if name != "json"]
    return {name: reader.get_tensor(name) for name in names}


def lines(model_dir):
    found = [json.loads(line) for line in (model_dir / "metrics.jsonl").read_text().splitlines()]
    return [
        {
            name: value
            for name, value in line.items()
            if name != "examples_per_second" and not is_measured(name)
        }
        for line in found
    ]
