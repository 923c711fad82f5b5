"""The ordered list of values that a checkpoint holds: collected, compared, read and assigned."""

import hashlib
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from ddl.distribution.workers import Workers
from ddl.errors import ConfigError
from ddl.optimizers.groups import by_name
from ddl.step.sharding import copied_share
from ddl.tasks.parts import attributes_of, copies_of, layers_of, models_of
from ddl.training.trainer import Trainer

Entry: TypeAlias = tuple[str, Sequence[int], str]
"""Path, shape and dtype of a variable of a checkpoint."""

Entries: TypeAlias = Mapping[str, Entry]
"""The entries of a checkpoint by key, such as `model/0003`."""

SEED_STATE = "seed_generator_state"
"""End of the path of the state of a generator of Keras's random layers."""

_ON_READ = tf.VariableSynchronization.ON_READ  # each replica has a value, and all are summed

_NUMBER = re.compile(r"_\d+(?=[/_])|(?<=\bvariable)_\d+")
"""The number of a layer that Keras named, or of a variable."""


class Value(NamedTuple):
    """A variable of a checkpoint.

    Attributes:
      key: Its name in TensorFlow's file: the part and a number.
      path: Its path in the model or the optimizer, for messages and warm starts.
      variable: The variable; a tensor of the training state.
      whole: Shape of the whole slot of which each replica's variable holds a share, if it does.
    """

    key: str
    path: str
    variable: tf.Variable | tf.Tensor
    whole: tf.TensorShape | None

    @property
    def entry(self) -> Entry:
        """Path, shape as a whole, and dtype."""
        shape = self.variable.shape if self.whole is None else self.whole
        return self.path, list(shape), self.variable.dtype.name


def values_of(trainer: Trainer) -> list[Value]:
    """Returns the variables of a trainer, in the same order in every process.

    The order is that in which Keras tracks variables, and that of attributes, lists and dicts.
    """
    found: dict[str, list[tuple[str, tf.Variable]]] = {"model": [], "averages": [], "optimizer": []}
    for name, optimizer in by_name(trainer.optimizer).items():
        found["optimizer"] += [(f"{name}/{v.path}", v.value) for v in optimizer.variables]
    if trainer.averages is not None:
        found["averages"] = [(_name(average), average) for average in trainer.averages.variables]
    seen = {id(variable) for part in found.values() for _, variable in part}
    for name, model in models_of(trainer.task).items():
        before = "" if name == "model" else f"{name}/"
        named = {id(v.value): (f"{before}{path}", v.value) for path, v in paths_of(model)}
        found["model"] += [one for key, one in named.items() if key not in seen]
        seen |= named.keys()
    others = [layers_of(trainer.task), attributes_of(trainer.task)]
    found["task"] = [*_within(others, "", seen)]  # what it holds beside its models
    slots = {} if trainer.sharding is None else trainer.sharding.slots
    return [
        Value(f"{part}/{number:04}", path, variable, slots.get(id(variable)))
        for part, every in found.items()
        for number, (path, variable) in enumerate(every)
    ]


def paths_of(model: keras.Model) -> list[tuple[str, keras.Variable]]:
    """Returns a model's variables with their paths, which name the functional models within it."""
    paths = {id(variable): variable.path for variable in model.variables}
    for inner in model._flatten_layers(include_self=False):
        for variable in inner.variables if isinstance(inner, keras.Model) else ():
            if inner.name not in (path := paths[id(variable)]).split("/"):  # as Keras names it
                paths[id(variable)] = f"{inner.name}/{path}"
    return [(paths[id(variable)], variable) for variable in model.variables]


def _within(item: object, path: str, seen: set[int]) -> Iterator[tuple[str, tf.Variable]]:
    """Yields the variables that an object leads to by attributes, lists and dicts, with paths.

    Adds the ids of variables and layers to `seen`, and skips those that it holds.
    """
    if isinstance(item, Mapping | list | tuple):
        for key, value in item.items() if isinstance(item, Mapping) else enumerate(item):
            yield from _within(value, f"{path}/{key}", seen)
    elif isinstance(item, keras.Variable):
        yield from _within(item.value, item.path, seen)
    elif id(item) in seen:
        return
    elif isinstance(item, tf.Variable):
        seen.add(id(item))
        yield path, item
    elif isinstance(item, keras.layers.Layer):
        layers = item._flatten_layers()
        seen.update(map(id, layers))
        yield from _within(item.variables, path, seen)
        for layer in layers:  # metrics, and variables of TensorFlow, which Keras does not track
            own = {k: v for k, v in attributes_of(layer).items() if not k.startswith("_self_")}
            yield from _within(own, layer.path or layer.name, seen)
    elif isinstance(item, keras.metrics.Metric | keras.optimizers.Optimizer):
        yield from _within(item.variables, path, seen)
    elif isinstance(item, keras.random.SeedGenerator | tf.random.Generator):
        yield from _within(item.state, path, seen)
    elif isinstance(item, tf.Module) or hasattr(item, "per_example"):
        seen.add(id(item))
        yield from _within(attributes_of(item), path, seen)


def check_covers(values: Iterable[Value], used: Iterable[tf.Variable]) -> None:
    """Checks that a checkpoint holds every variable that training uses.

    Args:
      values: The variables of the checkpoint.
      used: Variables that the training loop reads or writes, including replica-local copies.

    Raises:
      ConfigError: If a variable is not in the checkpoint.
    """
    held = {id(copy.handle) for value in values for copy in copies_of(value.variable)}
    if lost := sorted({_name(v) for v in used if id(v.handle) not in held}):
        raise ConfigError(
            f"The update uses the variables {some(lost)}, which no checkpoint would hold. "
            "Keep each one in an attribute of the task or of a layer."
        )


def differences(there: Entries, here: Entries) -> str:
    """Returns how a checkpoint differs from what is to be restored; "" if it does not.

    Names and their order count, without the numbers by which Keras counts a process's layers.

    Args:
      there: The variables of the checkpoint.
      here: The variables to restore.
    """
    found = []
    for key in {**there, **here}:
        was, now = (_text(entries.get(key)) for entries in (there, here))
        if _NUMBER.sub("", was) != _NUMBER.sub("", now):
            found.append(f"{key} is {was}, expected {now}")
    return some(found, 3)


def _text(entry: Entry | None) -> str:
    return "nothing" if entry is None else f"{entry[0]} ({entry[2]} {list(entry[1])})"


def snapshot(
    values: Iterable[Value], strategy: tf.distribute.Strategy, keeps: bool = True
) -> dict[str, tf.Tensor]:
    """Returns the values of variables by key, on the host. Eager, cross-replica context.

    Reading a host variable gives a tensor that shares its memory; a snapshot takes memory for the
    variables that change while it is held. A variable on a GPU is copied to the host once, from
    the first replica. Slots in shares are gathered one by one, so that only the host holds all of
    them whole.

    Later updates leave a snapshot as it is, by TensorFlow's sources (2.21):

    - A read shares the buffer and counts the reference (`ReadVariableOp`). An update writes in
      place only if the variable holds the only reference, else to a copy
      (`PrepareToUpdateVariable`). Once a sparse update has touched a variable, each read copies
      (`copy_on_read_mode`), on the same stream as the updates.
    - The copy to the host waits for all earlier work of the GPU's compute stream, and holds a
      reference to the buffer until it is complete (`GPUUtil::CopyGPUTensorToCPU`).
    - Variables are read one by one: once a sparse update has touched one on a parameter server,
      its server copies it for the read, and must not hold copies of all its variables at once.
    - The function returns when all copies are complete, so no later update runs beside them, and
      the snapshot shares no memory with variables on GPUs. ddl makes no further copy.

    TensorFlow's own asynchronous checkpoints fail with Keras 3 at the second save, and hold a
    second copy of every variable permanently.

    Args:
      values: The values.
      strategy: The strategy of the variables. Call it on all of its workers.
      keeps: Whether this worker needs the tensors; else it helps to gather and returns none.
    """
    taken = {}
    with tf.device("CPU:0"):
        for value in values:
            if value.whole is not None:
                tensor = _gathered(value.variable, value.whole, strategy)
            elif keeps or getattr(value.variable, "synchronization", None) == _ON_READ:
                tensor = tf.identity(value.variable)
            if keeps:
                taken[value.key] = tensor
    return taken


def _gathered(
    variable: tf.Variable, whole: tf.TensorShape, strategy: tf.distribute.Strategy
) -> tf.Tensor:
    """Returns a slot whole, without padding, from the shares of all replicas."""
    shares = strategy.experimental_local_results(variable)
    own = strategy.experimental_distribute_values_from_function(
        lambda context: shares[context.replica_id_in_sync_group % len(shares)].read_value()
    )
    rows = strategy.gather(own, axis=0)
    return tf.reshape(rows[: whole.num_elements()], whole)


def assign(
    values: Iterable[Value], reader: Any, strategy: tf.distribute.Strategy
) -> dict[str, tf.Tensor]:
    """Assigns the values of a checkpoint, one after the other. Eager, cross-replica context.

    Args:
      values: The values.
      reader: From `tf.train.load_checkpoint`; it holds the keys of all `values`.
      strategy: The strategy of the variables.

    Returns:
      Those of `values` that are tensors, by path.
    """
    workers, tensors = Workers(strategy), {}
    first, replicas = workers.index * workers.replicas_of_each, strategy.num_replicas_in_sync
    for value in values:
        with tf.device("CPU:0"):  # not whole on each device
            found = tf.constant(reader.get_tensor(value.key))
        if not isinstance(value.variable, tf.Variable):
            tensors[value.path] = tf.identity(found)
        elif value.whole is None:
            value.variable.assign(found, read_value=False)
        else:
            for number, copy in enumerate(copies_of(value.variable), first):
                copy.assign(copied_share(found, number, replicas))
    return tensors


def digest_of(entries: Entries, read: Callable[[str], np.ndarray]) -> str:
    """Returns the SHA-256 over keys and bytes of weights, slots, statistics and averages.

    The state, which says where a run stands, does not count, nor do the states of Keras's seed
    generators: without a seed they differ between equal runs, whose draws do not use them.

    Args:
      entries: The entries of a checkpoint, each of which is read.
      read: Returns the value of a key.
    """
    found = hashlib.sha256()
    for key, (path, *_) in entries.items():
        value = read(key)
        if not (key.startswith("state/") or path.endswith(SEED_STATE)):
            found.update(key.encode() + b"\0")
            found.update(_bytes(value))
    return found.hexdigest()


def checksums(values: Iterable[Value]) -> list[int]:
    """Returns the CRC-32 of each variable on this process; 0 for slots in shares."""
    copies = [None if value.whole is not None else copies_of(value.variable)[0] for value in values]
    return [0 if copy is None else zlib.crc32(_bytes(copy.numpy())) for copy in copies]


def _bytes(value: np.ndarray) -> bytes | memoryview:
    """Returns the content of an array, not copied; one of texts holds their addresses."""
    flat = np.ascontiguousarray(value).reshape(-1)
    return repr(flat.tolist()).encode() if flat.dtype.kind == "O" else flat.view(np.uint8).data


def _name(variable: Any) -> str:
    return str(variable.name).split(":")[0]


def some(names: Sequence[str], limit: int = 8) -> str:
    """Joins the first `limit` names, and adds how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
