"""Rows of benchmarks.gpu_counts: networks, and what differs from their plain training."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Row:
    """A trainer.

    Attributes:
      network: "MLP", "CNN", "GPT" or "ResNet-50".
      change: What differs from the first row of the network; "" for that row.
      arguments: Of the Trainer, besides task, data and batch size; functions are called.
      optimizer: Name of an optimizer of Keras or of `ddl.optimizers`.
      precision: The number format.
      replicas: Number of replicas.
      task: Arguments of the task; functions are called.
      evaluates: Whether a batch of an evaluation is counted instead of an update.
    """

    network: str
    change: str = ""
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    optimizer: str = "Adam"
    precision: str = "float32"
    replicas: int = 1
    task: dict[str, Any] = dataclasses.field(default_factory=dict)
    evaluates: bool = False

    @property
    def batch(self) -> int:
        """The global batch size."""
        return 32 if self.network == "ResNet-50" else 64

    def __str__(self) -> str:
        return f"{self.network}: {self.change}" if self.change else self.network


def _average() -> Any:
    import ddl

    return ddl.ExponentialMovingAverage(0.99)


def _flip_and_shift() -> list[Any]:
    import keras

    import ddl

    return [keras.layers.RandomFlip("horizontal"), ddl.layers.RandomShift(2, 2)]


_OPTIMIZERS = (
    "SGD",
    "MomentumSGD",
    "AdamW",
    "RMSprop",
    "Adagrad",
    "LARS",
    "LAMB",
)
ROWS = (
    Row("MLP"),
    *(Row("MLP", name, optimizer=name) for name in _OPTIMIZERS),
    Row("MLP", "mixed_float16", precision="mixed_float16"),
    Row("MLP", "mixed_bfloat16", precision="mixed_bfloat16"),
    Row("MLP", "accumulation over 2", {"accumulation_steps": 2}),
    Row("MLP", "accumulation over 4", {"accumulation_steps": 4}),
    Row("MLP", "clip_norm", {"clip_norm": 1.0}),
    Row("MLP", "weight average", {"weight_average": _average}),
    Row("MLP", "data made on the host", {"data_on_device": False}),
    Row("MLP", "mirrored on 2", replicas=2),
    Row("MLP", "mirrored on 2, accumulation over 2", {"accumulation_steps": 2}, replicas=2),
    Row("MLP", "evaluation", evaluates=True),
    Row("CNN"),
    Row("CNN", "augmentation: flip and shift", task={"augmentations": _flip_and_shift}),
    Row("CNN", "mirrored on 2, normalization synchronized", replicas=2),
    Row("CNN", "evaluation", evaluates=True),
    Row("GPT"),
    Row("GPT", "mixed_bfloat16", precision="mixed_bfloat16"),
    Row("GPT", "evaluation", evaluates=True),
    Row("ResNet-50"),
)
MOST_KERNELS = {"MLP": 50, "ResNet-50": 1_050}
"""The most kernels of an update that is not compiled, by row."""


def network(row: Row) -> tuple[Any, tuple[Any, Any]]:
    """Builds the model of a row, up to the logits; and 256 examples of zeros: inputs, labels."""
    import numpy as np

    import ddl
    from benchmarks.gpt import gpt

    labels = np.zeros(256, "i4")
    if row.network == "GPT":
        tokens = np.zeros([256, 32], "i8")
        return gpt(32, 256, width=64, heads=4, blocks=2), (tokens, tokens)
    if row.network == "ResNet-50":
        return ddl.models.resnet((64, 64, 3), 1000), (np.zeros([256, 64, 64, 3], "u1"), labels)
    images = np.zeros([256, 28, 28, 1], "u1")
    if row.network == "MLP":
        return ddl.models.mlp((28, 28, 1), 10), (images, labels)
    model = ddl.models.cnn(
        (28, 28, 1), 10, blocks=((16, 16),), hidden_units=(), batch_normalization=True
    )
    return model, (images, labels)
