"""The packaged play: a small text for language models that needs no network.

"Romeo and Juliet" by William Shakespeare, 1597, public domain: 133,465 bytes.
files/romeo_and_juliet.txt documents source, changes and split.
"""

import hashlib
from importlib import resources
from typing import Literal

from ddl.data.arrays import ArraySource
from ddl.data.formats.text import token_windows
from ddl.data.source import IndexedSource
from ddl.data.synthetic import synthetic_arrays
from ddl.errors import ConfigError, DataError, check_choice

_BYTES = {"train": 120_215, "test": 13_250}

PLAY_SHA256 = {
    "train": "105eb62f25137fe5d24cf9fb1d343b65e25dc7dce9caa559451378a90cf6d47c",
    "test": "2f964931dbc20dedd3221b4312f611e1ffd27ccdff3fa55d98db327872116516",
}


def romeo_and_juliet(
    split: Literal["train", "test"], length: int, name: Literal["play", "synthetic"] = "play"
) -> IndexedSource:
    """Builds a source of windows of the bytes of "Romeo and Juliet".

    Args:
      split: "train" has the first 90% of the play, "test" the rest.
      length: Bytes of a window.
      name: "play", or "synthetic" for about as many windows of random bytes.

    Returns:
      Features "token" and "next_token", both int64 [length]; see `ddl.data.token_windows`.

    Raises:
      ConfigError: If `split` or `name` is another, or `length` is below 1.
      DataError: If the packaged file is missing or its SHA-256 differs.
    """
    check_choice("romeo_and_juliet.split", split, tuple(PLAY_SHA256))
    check_choice("romeo_and_juliet.name", name, ("play", "synthetic"))
    if name == "synthetic":
        return _synthetic(split, length)
    file = resources.files("ddl.data").joinpath("files", f"romeo_and_juliet_{split}.txt")
    try:
        content = file.read_bytes()
    except OSError as error:
        raise DataError(f"{file} could not be read ({error}). Reinstall ddl.") from error
    found = hashlib.sha256(content).hexdigest()
    if found != PLAY_SHA256[split]:
        raise DataError(
            f"{file} is damaged: its SHA-256 must be {PLAY_SHA256[split]}, got {found}. Reinstall "
            "ddl."
        )
    return token_windows(str(file), length)


def _synthetic(split: str, length: int) -> ArraySource:
    if length < 1:
        raise ConfigError(f"romeo_and_juliet.length must be at least 1, got {length}.")
    count = max(1, _BYTES[split] // length)
    elements = {"token": ((length + 1,), "int64")}
    seed = list(_BYTES).index(split)
    windows = synthetic_arrays(elements, count, seed, below={"token": 256}).features["token"]
    return ArraySource(token=windows[:, :-1], next_token=windows[:, 1:])
