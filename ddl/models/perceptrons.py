"""Multilayer perceptrons, for images and for tables of numbers and categories."""

from collections.abc import Mapping, Sequence

import keras

from ddl.errors import ConfigError


def mlp(
    input_shape: Sequence[int],
    num_classes: int,
    *,
    hidden_units: Sequence[int] = (128,),
    dropout: float = 0.0,
    input_scale: float | None = None,
) -> keras.Model:
    """Builds a multilayer perceptron: flatten, dense layers with ReLU, logits.

    Args:
      input_shape: Shape of one input, such as (28, 28, 1).
      num_classes: Number of logits.
      hidden_units: Width of each hidden layer.
      dropout: Dropout rate after each hidden layer.
      input_scale: Factor applied to raw inputs. None: 1/255 for integers, such as bytes,
        and 1 for floats, as a Trainer's training data have them; without a Trainer 1/255.

    Returns:
      A model from [batch, *input_shape], any dtype, to logits [batch, num_classes].
    """
    inputs = keras.Input(tuple(input_shape), name="input")
    x = keras.layers.Flatten(name="flatten")(scaled(inputs, input_scale))
    x = hidden_layers(x, hidden_units, dropout, "dropout")
    return keras.Model(inputs, keras.layers.Dense(num_classes, name="logits")(x), name="mlp")


def table_mlp(
    num_outputs: int,
    *,
    numbers: int = 0,
    categories: Mapping[str, int] | None = None,
    embedding_width: int = 8,
    hidden_units: Sequence[int] = (128, 64),
    dropout: float = 0.0,
    numbers_mean: Sequence[float] | None = None,
    numbers_deviation: Sequence[float] | None = None,
) -> keras.Model:
    """Builds a perceptron that looks categories up in tables of vectors, and takes numbers as such.

    Guo and Berkhahn 2016, "Entity Embeddings of Categorical Variables".

    Args:
      num_outputs: Number of logits, or of numbers to predict.
      numbers: Length of the feature "numbers", float [batch, numbers]; 0 if there is none.
      categories: Number of values of each further feature, by its name; integers [batch].
      embedding_width: Width of the vectors.
      hidden_units: Width of each hidden layer.
      dropout: Dropout rate after each hidden layer.
      numbers_mean: Subtracted from the raw numbers, one for each; None subtracts nothing.
      numbers_deviation: Divisors of the centred numbers, one for each; None divides by 1.

    Returns:
      A model from a dict of features to [batch, num_outputs].

    Raises:
      ConfigError: If there are neither numbers nor categories, or both have one name, or mean or
        deviation have another length than the numbers.
    """
    mean = [0.0] * numbers if numbers_mean is None else list(numbers_mean)
    deviation = [1.0] * numbers if numbers_deviation is None else list(numbers_deviation)
    if not len(mean) == len(deviation) == numbers or not all(each > 0 for each in deviation):
        raise ConfigError(
            "table_mlp.numbers_mean must be a number, and table_mlp.numbers_deviation a number "
            f"above 0, for each of the {numbers} numbers, got {mean} and {deviation}."
        )
    if numbers and "numbers" in (categories or {}):
        raise ConfigError(
            "table_mlp.categories must not have a feature 'numbers', the name of the feature of "
            "numbers. Rename the category in the data."
        )
    inputs: dict[str, keras.KerasTensor] = {}
    columns: list[keras.KerasTensor] = []
    if numbers:
        inputs["numbers"] = keras.Input((numbers,), name="numbers")
        offset = [-m / d for m, d in zip(mean, deviation, strict=True)]
        # In the dtype of the inputs, which is never half precision: there the difference of large
        # numbers loses all its digits.
        scale = keras.layers.Rescaling(
            [1 / d for d in deviation], offset, name="scale", dtype=keras.config.floatx()
        )
        columns.append(scale(inputs["numbers"]))
    for name, count in (categories or {}).items():
        inputs[name] = keras.Input((), dtype="int64", name=name)
        table = keras.layers.Embedding(count, embedding_width, name=f"{name}_vectors")
        columns.append(table(inputs[name]))
    if not columns:
        raise ConfigError(
            "table_mlp needs numbers, categories, or both; got neither. Set table_mlp.numbers to "
            "the number of columns with numbers, or name features in table_mlp.categories."
        )
    x = keras.layers.Concatenate(name="columns")(columns) if len(columns) > 1 else columns[0]
    x = hidden_layers(x, hidden_units, dropout, "dropout")
    return keras.Model(inputs, keras.layers.Dense(num_outputs, name="outputs")(x), name="table_mlp")


def scaled(inputs: keras.KerasTensor, factor: float | None) -> keras.KerasTensor:
    """Scales raw inputs; None as the argument `input_scale` of `mlp`."""
    scale = keras.layers.Rescaling(1 / 255 if factor is None else factor, name="scale")
    scale.scales_integers_only = factor is None  # for ddl.tasks.checks.check_data
    return scale(inputs)


def hidden_layers(
    x: keras.KerasTensor, widths: Sequence[int], dropout: float, name: str
) -> keras.KerasTensor:
    """Adds dense layers with ReLU, each with a dropout of that name if the rate is above 0."""
    for number, units in enumerate(widths, start=1):
        x = keras.layers.Dense(units, activation="relu", name=f"hidden_{number}")(x)
        if dropout:
            x = keras.layers.Dropout(dropout, name=f"{name}_{number}")(x)
    return x
