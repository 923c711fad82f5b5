"""The packaged handwritten digits: small, real data that need no network.

1,797 images of 8×8 pixels with values from 0 to 16, 10 classes (Alpaydin and Kaynak, 1998, CC BY
4.0). files/digits.txt documents source, licence and split.
"""

import hashlib
import io
from importlib import resources
from typing import Literal

import numpy as np

from ddl.errors import DataError

DIGITS_SHA256 = "a78b65c1040dbb98f15cad82c868f2a76683f97fb1f6a61338968f04e85025fc"


def load_digits(split: Literal["train", "test"]) -> tuple[np.ndarray, np.ndarray]:
    """Loads one split of the digits.

    Args:
      split: "train" has 1,437 images, "test" the 360 held out.

    Returns:
      Images, uint8 [n, 8, 8, 1] with values from 0 to 16, and labels, int64 [n].

    Raises:
      DataError: If the packaged file is missing or its SHA-256 differs.
    """
    file = resources.files("ddl.data").joinpath("files", "digits.npz")
    try:
        content = file.read_bytes()
    except OSError as error:
        raise DataError(f"{file} could not be read ({error}). Reinstall ddl.") from error
    found = hashlib.sha256(content).hexdigest()
    if found != DIGITS_SHA256:
        raise DataError(
            f"{file} is damaged: its SHA-256 must be {DIGITS_SHA256}, got {found}. Reinstall ddl."
        )
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        return arrays[f"{split}_image"], arrays[f"{split}_label"].astype(np.int64)
