"""A loss weight by schedule in a run of a config, which logs it and resumes it."""

import shutil

import gin
import numpy as np

import ddl
from tests.run.test_train import metrics, run, tensors

PARAMS = (
    "Trainer.task = @Annealed()",
    "Annealed.model = @mlp()",
    "mlp.hidden_units = (8,)",
    "Annealed.kl = @LossWeight()",
    "LossWeight.schedule = @PolynomialDecay()",
    "PolynomialDecay.initial_learning_rate = 0.0",
    "PolynomialDecay.decay_steps = 8",
    "PolynomialDecay.end_learning_rate = 1.0",
    *("TRAIN_STEPS = 4", "CHECKPOINT_EVERY = 2", "LOG_EVERY = 2", "EVAL_EVERY = None"),
)


class Annealed:
    def __init__(self, model, kl: ddl.LossWeight):
        self.model, self.kl = model, kl

    def per_example(self, features, training):
        logits = self.model(features["image"], training=training)
        norm = (logits**2)[:, 0]
        return ddl.PerExample(self.kl() * norm + (1 - self.kl()) * (logits[:, 1] - 1) ** 2)


def test_it_is_logged_and_continues_after_a_resume(tmp_path):
    gin.external_configurable(Annealed, module="tests")
    options = {"gin_file": "digits_mlp.gin", "mode": "train", "allow_unused": ("Classification.*",)}
    run(tmp_path / "run", *PARAMS, **options)
    logged = {line["step"]: line["loss_weight/kl"] for line in metrics(tmp_path / "run", "train")}
    assert logged == {2: 0.125, 4: 0.375}  # of the updates 1 and 3, counted from 0
    shutil.copytree(tmp_path / "run", tmp_path / "resumed")
    for file in (tmp_path / "resumed" / "checkpoints").glob("step-4*"):
        file.unlink()
    run(tmp_path / "resumed", *PARAMS, **options)
    ours, theirs = tensors(tmp_path / "resumed"), tensors(tmp_path / "run")
    for name, value in theirs.items():
        np.testing.assert_array_equal(ours[name], value, err_msg=name)
