"""Low-rank adaptation (Hu et al. 2021, "LoRA") of a text classifier of keras-hub."""

from typing import cast

import gin
import keras
import keras_hub
import numpy as np


@gin.register
def adapted(rank: int, preset: str | None = None) -> keras.Model:
    """Returns a classifier of two classes, of which only low-rank changes and the head train.

    Args:
      rank: Rank of the changes of the attention's kernels.
      preset: Name of a preset of DistilBERT, which is downloaded, or a folder that
        `save_to_preset` wrote; its own tokenizer must make the tokens. None makes a small
        model with random weights.
    """
    classes = keras_hub.models
    if preset is not None:
        model = classes.DistilBertTextClassifier.from_preset(preset, 2, preprocessor=None)
    else:
        backbone = classes.DistilBertBackbone(
            vocabulary_size=WORDS,
            num_layers=2,
            num_heads=4,
            hidden_dim=64,
            intermediate_dim=128,
            max_sequence_length=16,
        )
        model = classes.DistilBertTextClassifier(backbone, num_classes=2)
    model.backbone.enable_lora(rank)
    return cast(keras.Model, model)


WORDS = 32


@gin.register
def reviews(count: int, seed: int, length: int = 16) -> dict[str, np.ndarray]:
    """Returns texts of random words; the label says whether good words outnumber bad ones.

    Args:
      count: Number of texts.
      seed: Seed of the words.
      length: Tokens of a text; 0 is padding.
    """
    random = np.random.default_rng(seed)
    words = random.integers(1, WORDS, (count, length))
    mask = np.arange(length) < random.integers(8, length + 1, (count, 1))
    good, bad = (((words % 4 == kind) & mask).sum(1) for kind in (0, 1))
    features = {"token_ids": np.where(mask, words, 0), "padding_mask": mask}
    return {**features, "label": (good > bad).astype("int64")}
