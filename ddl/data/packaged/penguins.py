"""The packaged penguins: a small, real table of numbers and categories that needs no network.

Gorman, Williams and Fraser 2014, CC0. files/penguins.txt documents source, licence and split.
"""

import csv
import hashlib
import io
from importlib import resources
from typing import Literal

import numpy as np

from ddl.data.arrays import ArraySource
from ddl.data.synthetic import synthetic_arrays
from ddl.errors import DataError, check_choice

PENGUINS_SHA256 = "07760e771dc419000f5c6ab51fc098ce6038579061c6b0cfc9cb3090648a20be"

CATEGORIES = {
    "species": ("Adelie", "Chinstrap", "Gentoo"),
    "island": ("Biscoe", "Dream", "Torgersen"),
    "sex": ("female", "male"),
}
"""The values of each category, in the order of the integers that stand for them."""

_EXAMPLES = {"train": 266, "test": 67}
_SIZES = ("bill_length_mm", "bill_depth_mm", "flipper_length_mm")


def penguins(
    split: Literal["train", "test"],
    label: Literal["species", "body_mass"] = "species",
    name: Literal["penguins", "synthetic"] = "penguins",
) -> ArraySource:
    """Loads one split of the penguins, to predict their species or their body mass.

    Args:
      split: "train" has 266 penguins, "test" the 67 held out.
      label: "species" is an integer from 0 to 2; "body_mass" is in kilograms.
      name: "penguins", or "synthetic" for as many rows of random numbers and categories.

    Returns:
      Features "numbers", float32 [n, 4] (length and depth of the bill and length of the flipper in
      millimetres, body mass in kilograms), "island" and "sex", int64 [n] as in `CATEGORIES`, and
      "label", int64 [n]. For the body mass, "numbers" is [n, 3] without it, there is a feature
      "species", int64 [n], and "label" is float32 [n].

    Raises:
      ConfigError: If `split`, `label` or `name` is another.
      DataError: If the packaged file is missing or its SHA-256 differs.
    """
    check_choice("penguins.split", split, ("train", "test"))
    check_choice("penguins.label", label, ("species", "body_mass"))
    check_choice("penguins.name", name, ("penguins", "synthetic"))
    if name == "synthetic":
        return _synthetic(split, label)
    file = resources.files("ddl.data").joinpath("files", "penguins.csv")
    try:
        content = file.read_bytes()
    except OSError as error:
        raise DataError(f"{file} could not be read ({error}). Reinstall ddl.") from error
    found = hashlib.sha256(content).hexdigest()
    if found != PENGUINS_SHA256:
        raise DataError(
            f"{file} is damaged: its SHA-256 must be {PENGUINS_SHA256}, got {found}. Reinstall ddl."
        )
    rows = [row for row in csv.DictReader(io.StringIO(content.decode())) if row["split"] == split]
    sizes = np.array([[row[name] for name in _SIZES] for row in rows], np.float32)
    mass = np.array([float(row["body_mass_g"]) / 1000 for row in rows], np.float32)
    categories = {
        name: np.array([values.index(row[name]) for row in rows], np.int64)
        for name, values in CATEGORIES.items()
    }
    if label == "species":
        numbers = np.concatenate([sizes, mass[:, np.newaxis]], axis=1)
        return ArraySource(numbers=numbers, label=categories.pop("species"), **categories)
    return ArraySource(numbers=sizes, label=mass, **categories)


def _synthetic(split: str, label: str) -> ArraySource:
    of_species = label == "species"
    categories = {"species": 3, "island": 3, "sex": 2}
    elements: dict[str, tuple[tuple[int, ...], str]] = {
        "numbers": ((4,) if of_species else (3,), "float32"),
        **{name: ((), "int64") for name in categories},
    }
    if of_species:
        elements["label"] = elements.pop("species")
        categories["label"] = categories.pop("species")
    else:
        elements["label"] = ((), "float32")
    seed = list(_EXAMPLES).index(split)
    return synthetic_arrays(elements, _EXAMPLES[split], seed, below=categories)
