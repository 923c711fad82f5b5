"""The figures that a trainer keeps."""

import keras
import numpy as np

import ddl
from ddl.metrics.history import History
from ddl.run.loop import Periodic

DATA = {
    "image": np.random.default_rng(0).normal(size=(16, 3)).astype("f4"),
    "label": np.arange(16) % 2,
}


def test_a_step_and_split_have_one_row_until_it_is_dropped():
    history = History()
    history.write(10, 1.0, "train", {"loss": 2.0, "accuracy": 0.25})
    history.write(10, 1.0, "eval", {"loss": 2.5, "accuracy": 0.5})
    history.write(10, 1.0, "train", {"learning_rate": 0.1})
    history.write(20, 2.0, "train", {"loss": 1.0, "accuracy": 0.5})
    first = {"step": 10, "epoch": 1.0, "split": "train"}
    assert history[0] == {**first, "loss": 2.0, "accuracy": 0.25, "learning_rate": 0.1}
    history.drop_after(10)
    assert [(row["step"], row["split"]) for row in history] == [(10, "train"), (10, "eval")]


def test_what_a_trainer_reads_is_in_its_history():
    task = ddl.Classification(keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)]))
    trainer = ddl.Trainer(task, "sgd", DATA, eval_data=DATA, global_batch_size=8)
    read = []
    every = Periodic(2, lambda _: read.append(trainer.read_metrics()), 4)
    trainer.train(epochs=2, after_loop=[every])
    evaluated = trainer.evaluate()
    last = trainer.train(2)
    rows = [{"step": 2, "epoch": 1.0, "split": "train", **read[0]}]
    rows += [{"step": 4, "epoch": 2.0, "split": "train", **read[1]}]
    rows += [{"step": 4, "epoch": 2.0, "split": "eval", **evaluated}]
    rows += [{"step": 6, "epoch": 3.0, "split": "train", **last}]
    assert list(trainer.history) == rows
    state = trainer.state
    trainer.train(2)
    trainer.state = state
    assert list(trainer.history) == rows
