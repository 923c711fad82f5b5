"""Lookups in embedding tables that read the rows that they need, not the whole table.

`keras.layers.Embedding` and `tf.gather` read a table before they gather rows. The read is free only
until the first sparse update of the table: from then on TensorFlow copies the whole table in each
read, so that a step takes longer the more rows there are. A `ResourceGather` reads only the rows,
and gives the same bits.
"""

import functools
from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common.stateless_scope import in_stateless_scope

from ddl import microbatch
from ddl.distribution.traits import traits_of


def look_up(table: keras.Variable | tf.Variable, ids: tf.Tensor) -> tf.Tensor:
    """Returns rows of a table, in the time that the rows take. In replica context, or eager.

    Call it instead of `tf.gather(table, ids)` in a layer of your own. The gradient is sparse: it
    holds the rows that were looked up. On TPUs, and of a variable to which `stateless_call` gives
    another value, this is `tf.gather`.

    Args:
      table: A variable [rows, …].
      ids: int32 or int64 [batch, …], from 0 to rows - 1. On CPUs another id raises an error; on
        GPUs it gives zeros.

    Returns:
      [*ids.shape, *table.shape[1:]], in the dtype that reading the table would give.
    """
    if not _reads_rows():
        value = table.value if isinstance(table, keras.Variable) else table
        return tf.gather(value, ids)
    variable = table._value if isinstance(table, keras.Variable) else table
    # tf.gather would read a variable of several replicas as a whole.
    local = variable._get() if hasattr(variable, "_get") else variable
    rows = local.sparse_read(ids)
    return table._maybe_autocast(rows) if isinstance(table, keras.Variable) else rows


def as_ids(inputs: tf.Tensor) -> tf.Tensor:
    """Returns ids as int64; int32 stays.

    Keras casts to int32, where a large id of an unsigned type may be that of another row.
    """
    return inputs if inputs.dtype == tf.int32 else tf.cast(inputs, tf.int64)


def look_up_rows(layers: Iterable[keras.layers.Layer]) -> None:
    """Makes `keras.layers.Embedding` call `look_up` in a trainer; elsewhere Keras's code runs.

    A subclass is left as it is, since it may override what Keras's `call` reads, and so is a layer
    whose `call` was replaced. The attributes of Keras and of TensorFlow that this module reads are
    private; tests/layers/test_lookups.py guards them.

    Args:
      layers: The layers of a task; others than embeddings are left as they are.
    """
    for layer in layers:
        # A copy of a layer has the `call` of the original.
        own = vars(layer).get("call")
        is_ours = isinstance(own, functools.partial) and own.func is _call
        if type(layer) is keras.layers.Embedding and (own is None or is_ours):
            layer.call = functools.partial(_call, layer)


def _reads_rows() -> bool:
    """Returns whether the rows of a variable are those of its resource here.

    In a StatelessScope a variable has another value. Outside of replicas, as where Keras builds a
    model, a variable of several replicas has no resource of its own.
    """
    replicated = traits_of(tf.distribute.get_strategy()).replicates_handles
    return not (replicated or in_stateless_scope() or tf.distribute.in_cross_replica_context())


def _call(layer: keras.layers.Embedding, inputs: Any) -> Any:
    in_trainer = microbatch.current() is not None and isinstance(inputs, tf.Tensor)
    # Otherwise the rows are not those of the variable.
    plain = _reads_rows() and not (layer.lora_enabled or layer.quantization_mode)
    if not (in_trainer and plain and isinstance(layer._embeddings._value, tf.Variable)):
        return type(layer).call(layer, inputs)
    inputs = as_ids(inputs)
    # As in keras.ops.take, negative ids count from the end.
    count = tf.constant(layer.input_dim, inputs.dtype)
    ids = tf.where(inputs < 0, inputs + count, inputs)
    return tf.cast(look_up(layer._embeddings, ids), layer.compute_dtype)
