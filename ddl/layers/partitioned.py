"""An embedding table in several parts, which parameter servers share out among them."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ddl.errors import ConfigError
from ddl.layers.lookups import as_ids, look_up
from ddl.microbatch import CannotCompileError, is_compiled
from ddl.seeds import hashed

_BYTES_OF_NUMBER = 4
"""Counted for each number whatever its dtype, so that the precision does not change the parts."""


@keras.saving.register_keras_serializable("ddl")
class PartitionedEmbedding(keras.layers.Layer):
    """A table of vectors, looked up as `keras.layers.Embedding` does, with a weight for each part.

    Parameter servers hold the parts in turn, with their optimizer slots, so that a table may be
    larger than what one server can hold. Vector i is row i // parts of part i % parts: frequent
    ids, which vocabularies often put first, are spread over all servers. A lookup asks each part
    for its own rows alone, and the gradient of each part is sparse.

    The number of parts depends on the arguments alone. Checkpoints therefore fit any number of
    servers, and every other strategy. With any number of parts the layer computes the same.

    Attributes:
      parts: Number of parts.
      tables: The weights, in the order of the parts; [rows of the part, output_dim].
    """

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        *,
        max_parts: int = 16,
        min_part_bytes: int = 1 << 20,
        embeddings_initializer: Any = "uniform",
        **arguments: Any,
    ):
        """Initializes the layer; creates no weight.

        Args:
          input_dim: Number of vectors.
          output_dim: Width of the vectors.
          max_parts: Largest number of parts. A multiple of the number of servers gives each server
            equally many.
          min_part_bytes: A table is split into no parts smaller than this, with 4 bytes a number. A
            table of fewer bytes is one part.
          embeddings_initializer: Keras initializer, called once for each part with the part's
            shape. Initializers of Keras draw each part from a seed of its own. A function must
            itself draw different numbers in each call.
          **arguments: Those of `keras.layers.Layer`.

        Raises:
          ConfigError: If a number is below 1.
        """
        super().__init__(**arguments)
        given = {
            "input_dim": input_dim,
            "output_dim": output_dim,
            "max_parts": max_parts,
            "min_part_bytes": min_part_bytes,
        }
        for name, number in given.items():
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise ConfigError(
                    f"PartitionedEmbedding.{name} must be an integer of at least 1, got {number!r}."
                )
        self.input_dim, self.output_dim = input_dim, output_dim
        self.max_parts, self.min_part_bytes = max_parts, min_part_bytes
        self.embeddings_initializer = keras.initializers.get(embeddings_initializer)
        self.parts = parts_of(input_dim, output_dim, max_parts, min_part_bytes)
        self.tables: list[keras.Variable] = []
        # The rows are cast, not the tables.
        self.autocast = False

    def build(self, input_shape: Any = None) -> None:
        """Creates the parts, one after the other."""
        if self.tables:
            return
        for number in range(self.parts):
            # Each on the next server: TensorFlow gives every new variable to the next one.
            self.tables.append(
                self.add_weight(
                    shape=(self._rows_of(number), self.output_dim),
                    initializer=_of_part(self.embeddings_initializer, number),
                    name=f"embeddings_{number}",
                )
            )

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        """Looks up vectors.

        Args:
          inputs: Ids, integer [batch, …], from 0 to input_dim - 1; as with Keras's Embedding,
            negative ones count from the end. Another id raises an error, also on GPUs.

        Returns:
          Vectors [batch, …, output_dim].
        """
        if self.parts > 1 and is_compiled():
            raise CannotCompileError(
                f"the number of rows that {self.name} looks up in each part of its table depends "
                "on the examples"
            )
        ids = self._checked(tf.reshape(as_ids(inputs), [-1]))
        rows = self._looked_up(ids)
        shaped = tf.reshape(rows, tf.concat([tf.shape(inputs), [self.output_dim]], axis=0))
        return tf.cast(
            tf.ensure_shape(shaped, [*inputs.shape, self.output_dim]), self.compute_dtype
        )

    def _checked(self, ids: tf.Tensor) -> tf.Tensor:
        """Returns ids, [n], as rows of the whole table; fails for ids that the table lacks.

        The kernels would name the row of a part instead of the id, and on GPUs give zeros.
        """
        count = tf.constant(self.input_dim, ids.dtype)
        least, most = tf.reduce_min(ids), tf.reduce_max(ids)
        exist = tf.raw_ops.Assert(
            condition=(least >= -count) & (most < count),
            # `ddl.data.checks` reads this text, which is that of TensorFlow's own lookups.
            data=[
                "indices = ",
                tf.where(most < count, least, most),
                f" is not in [0, {self.input_dim})",
            ],
        )
        with tf.control_dependencies([exist] if exist is not None else []):
            return tf.where(ids < 0, ids + count, ids)

    def _looked_up(self, ids: tf.Tensor) -> tf.Tensor:
        """Returns the vectors of ids, [n], each read from its own part."""
        if self.parts == 1:
            return look_up(self.tables[0], ids)
        parts = tf.constant(self.parts, ids.dtype)
        part = tf.cast(ids % parts, tf.int32)
        places = tf.dynamic_partition(tf.range(tf.size(ids)), part, self.parts)
        rows = tf.dynamic_partition(ids // parts, part, self.parts)
        vectors = [look_up(table, own) for table, own in zip(self.tables, rows, strict=True)]
        return tf.dynamic_stitch(places, vectors)

    def whole(self) -> np.ndarray:
        """Returns the whole table, [input_dim, output_dim]. Eager."""
        values = [np.array(table) for table in self.tables]
        whole = np.empty((self.input_dim, self.output_dim), values[0].dtype)
        for number, value in enumerate(values):
            whole[number :: self.parts] = value
        return whole

    def assign(self, whole: np.ndarray) -> None:
        """Assigns the whole table, [input_dim, output_dim], to the parts. Eager.

        Raises:
          ConfigError: If the table has another shape, or the layer is not built.
        """
        shape = (self.input_dim, self.output_dim)
        if not self.tables or np.shape(whole) != shape:
            raise ConfigError(
                f"{self.name}.assign takes the whole table, of shape {shape}, once the layer is "
                f"built, got {np.shape(whole)}" + ("." if self.tables else ". Call build() first.")
            )
        for number, table in enumerate(self.tables):
            table.assign(whole[number :: self.parts])

    def _rows_of(self, number: int) -> int:
        """Returns the rows of a part."""
        return len(range(number, self.input_dim, self.parts))

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments."""
        return super().get_config() | {
            "input_dim": self.input_dim,
            "output_dim": self.output_dim,
            "max_parts": self.max_parts,
            "min_part_bytes": self.min_part_bytes,
            "embeddings_initializer": keras.initializers.serialize(self.embeddings_initializer),
        }

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Returns the shape of the output."""
        return (*input_shape, self.output_dim)

    def compute_output_spec(self, inputs: Any) -> keras.KerasTensor:
        """Returns shape and dtype of the output."""
        return keras.KerasTensor(self.compute_output_shape(inputs.shape), dtype=self.compute_dtype)


def parts_of(input_dim: int, output_dim: int, max_parts: int, min_part_bytes: int) -> int:
    """Returns the number of parts of a table; see `PartitionedEmbedding`."""
    size = _BYTES_OF_NUMBER * input_dim * output_dim
    return max(1, min(max_parts, size // min_part_bytes, input_dim))


def _of_part(initializer: Any, number: int) -> Any:
    """Returns the initializer of a part: one of Keras draws the same numbers in each call."""
    if not isinstance(initializer, keras.initializers.Initializer) or number == 0:
        return initializer
    seed, arguments = getattr(initializer, "seed", None), initializer.get_config()
    if not isinstance(seed, int) or "seed" not in arguments:
        return initializer  # draws nothing, or by a SeedGenerator, which draws anew in each call
    of_part = hashed(seed, f"part {number}") % 2**31
    return type(initializer).from_config({**arguments, "seed": of_part})
