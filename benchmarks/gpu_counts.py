"""Operations of an update on a GPU: python -m benchmarks.gpu_counts.

No GPU is needed. The benchmark takes the GPU's path on CPU devices, of which device 1 stands for
the GPU, and counts in the graph of the training loop what a GPU would compute: operations that
start a kernel, call cuBLAS or cuDNN, or copy. Left out are those that only name, share or describe
memory, those of constants, and repeats that TensorFlow merges. The loop over microbatches counts
for each turn. Bytes across are those that an update moves between host and GPU or between GPUs,
without the gradients' all-reduce. What is left to the host has no kernel for GPUs, or keeps more
than 15 elements in host memory, as TensorFlow does with int32.

Each row changes one thing of the first row of its network. The MLP is 784-128-10 with a batch of
64, float32 and Adam; the CNN has two convolutions with batch normalization; the GPT has two blocks
of width 64; ResNet-50 has images of 64 by 64 and a batch of 32. Images are uint8 and labels int64:
int32 labels cost one more operation, the cast to the user's dtype, since they rest on a GPU as
int64. XLA makes fewer kernels of an update (`--jit_compile`), which a graph does not show.

The bare loop is written by hand: it gathers the batch from arrays on the device, computes loss and
gradient with Keras's layers, applies TensorFlow's fused Adam, and adds up loss and accuracy. It
does not look for NaN. It is counted where it does all that the row names.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.framework import function_def_to_graph, kernels

import ddl
from benchmarks import contenders, harness
from benchmarks.harness import Cell, Options, Report, Table, Target
from ddl import distribution
from ddl.distribution.path import GPU, taking
from ddl.precision import set_precision

HOST, DEVICE = "CPU:0", "CPU:1"
MOST = 15
"""Elements that a tensor in host memory may have; a microbatch has more."""
WORSE = 1.2
"""The most operations of an update, relative to those of its bare loop."""

_LOOPS = ("While", "StatelessWhile")
# They start no kernel: they name, share or describe what is there, or call functions.
_FREE = {
    *("Const", "Identity", "IdentityN", "NoOp", "Reshape", "ExpandDims", "Squeeze", "Shape"),
    *("ReadVariableOp", "AssignVariableOp", "VarHandleOp", "DestroyResourceOp", "EnsureShape"),
    *("PartitionedCall", "StatefulPartitionedCall", "If", "StatelessIf", "Placeholder", *_LOOPS),
    *("Bitcast", "StridedSlice", "Empty", "StopGradient", "PreventGradient", "Size", "Rank"),
}
_CALLS = {*_LOOPS, "PartitionedCall", "StatefulPartitionedCall", "If", "StatelessIf", "Placeholder"}
_LIBRARY = {
    *("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Conv2D", "Conv2DBackpropInput"),
    *("Conv2DBackpropFilter", "FusedBatchNormV3", "FusedBatchNormGradV3", "MaxPool", "MaxPoolGrad"),
}


# ------------------------------------------------------------ counting


@dataclasses.dataclass
class Update:
    """What an update does.

    Attributes:
      operations: Number of operations that start a kernel, call a library, or copy.
      library_calls: Those of them that call a library.
      crossing: Bytes that cross between devices.
      on_host: What is left to the host, a line each.
    """

    operations: int = 0
    library_calls: int = 0
    crossing: int = 0
    on_host: list[str] = dataclasses.field(default_factory=list)


def count(graph: tf.Graph, turns: int = 1) -> Update:
    """Looks at the only loop of a traced function's graph: its body and its condition.

    Args:
      graph: `tf.function(…).get_concrete_function(…).graph`.
      turns: Turns of each loop within the loop.
    """
    definition = graph.as_graph_def(add_shapes=True)
    functions = {f.signature.name: f for f in definition.library.function}
    (loop,) = (node for node in definition.node if node.op in _LOOPS)
    update, seen = Update(), set()
    with tf.Graph().as_default():
        tf.graph_util.import_graph_def(definition)
        waiting = [(loop.attr[part].func.name, 1) for part in ("body", "cond")]
        entered = {name for name, _ in waiting}
        while waiting:
            name, times = waiting.pop()
            body = function_def_to_graph.function_def_to_graph(functions[name])
            for operation in needed(body):
                counts = times * _counts(operation, (name, *_identity(operation)), seen)
                update.operations += counts
                update.library_calls += counts * (operation.type in _LIBRARY)
                update.crossing += sum(_crossing(operation))
                update.on_host += left_to_host(operation)
                for called in _called(operation):
                    if called in functions and called not in entered:
                        entered.add(called)
                        each = turns if operation.type in _LOOPS else 1
                        waiting.append((called, times * each))
    _is_computed.cache_clear()  # else it would hold the graphs
    return update


def needed(body: Any) -> Iterator[tf.Operation]:
    """Returns the operations that results or side effects of a function's graph need."""
    waiting = [*(tensor.op for tensor in body.outputs), *body.control_outputs]
    seen = set(waiting)
    while waiting:
        operation = waiting.pop()
        yield operation
        for given in [*(t.op for t in operation.inputs), *operation.control_inputs]:
            if given not in seen:
                seen.add(given)
                waiting.append(given)


def _identity(operation: tf.Operation) -> tuple[Any, ...]:
    attributes = sorted((key, str(value)) for key, value in operation.node_def.attr.items())
    return operation.type, *(tensor.name for tensor in operation.inputs), str(attributes)


def _called(operation: tf.Operation) -> Iterator[str]:
    for attribute in operation.node_def.attr.values():
        yield from [attribute.func.name, *(each.name for each in attribute.list.func)]


def _counts(operation: tf.Operation, same: Any, seen: set[Any]) -> bool:
    """Returns whether an operation counts: not of constants alone, not twice, not on the host."""
    if operation.type in _FREE or not any(_is_computed(t.op) for t in operation.inputs):
        return False
    kernel = _kernel(operation)
    in_memory = set(kernel.host_memory_arg) if kernel else set()
    is_host = {name for name, _ in _arguments(operation)} <= in_memory
    if _place(operation) == HOST or is_host or same in seen:
        return False
    if not operation.type.startswith("Resource"):
        seen.add(same)
    return True


@functools.cache
def _is_computed(operation: tf.Operation) -> bool:
    """Returns whether an operation is no function of constants."""
    if operation.type == "Const":
        return False
    return not operation.inputs or any(_is_computed(t.op) for t in operation.inputs)


def _crossing(operation: tf.Operation) -> Iterator[int]:
    """Returns the bytes that other devices give to an operation."""
    for tensor in operation.inputs:
        places = _place(tensor.op), _place(operation)
        if all(places) and places[0] != places[1] and tensor.op.type != "Const":
            yield (tensor.shape.num_elements() or 2**40) * tensor.dtype.size


def _place(operation: tf.Operation) -> str:
    return tf.DeviceSpec.from_string(operation.device).to_string().rpartition("device:")[2]


def left_to_host(operation: tf.Operation) -> Iterator[str]:
    """Returns a line if an operation has no kernel for GPUs, and one for each larger host tensor.

    TensorFlow's wheel registers its kernels for GPUs on every machine. A kernel names its arguments
    in host memory; those of functions and loops are there if they are int32.
    """
    kernel, is_call = _kernel(operation), operation.type in _CALLS
    if not _is_computed(operation):
        return
    if kernel is None and not is_call:
        yield f"{operation.type} has no kernel for GPUs ({operation.name})"
        return
    for name, tensor in _arguments(operation):
        is_there = tensor.dtype == tf.int32 if is_call else name in kernel.host_memory_arg
        shape = tensor.shape
        size = shape.num_elements() if shape.rank is not None else math.inf
        size = (0 if shape.rank == 1 else math.inf) if size is None else size
        if not _is_computed(tensor.op):
            continue
        if is_there and tensor.dtype not in (tf.resource, tf.variant) and size > MOST:
            yield f"{operation.type}: {name}, {tensor.dtype.name}{shape}, is in host memory"


def _arguments(operation: tf.Operation) -> Iterator[tuple[str, tf.Tensor]]:
    """Returns the name and tensor of each input and result; those of a list one by one."""
    definition = operation.op_def
    for arguments, tensors in (
        (definition.input_arg, operation.inputs),
        (definition.output_arg, operation.outputs),
    ):
        names: list[str] = []
        for each in arguments:
            number = operation.get_attr(each.number_attr) if each.number_attr else 1
            if each.type_list_attr:
                number = len(operation.get_attr(each.type_list_attr))
            names += [each.name] * number
        yield from zip(names, tensors, strict=True)


def _kernel(operation: tf.Operation) -> Any:
    """Returns the kernel that a GPU runs for an operation; None if there is none."""
    for device in ("GPU", "DEFAULT"):
        for kernel in _kernels(operation.type):
            is_plain = kernel.device_type == device and not kernel.label
            if is_plain and all(_fits(operation, each) for each in kernel.constraint):
                return kernel
    return None


@functools.cache
def _kernels(kind: str) -> list[Any]:
    return list(kernels.get_registered_kernels_for_op(kind).kernel)


def _fits(operation: tf.Operation, constraint: Any) -> bool:
    value = operation.node_def.attr[constraint.name]
    return (set(value.list.type) or {value.type}) <= set(constraint.allowed_values.list.type)


# ------------------------------------------------------------ rows


@dataclasses.dataclass(frozen=True)
class Row:
    """A trainer: its network, what differs from its plain training, and further arguments."""

    network: str
    change: str = ""
    optimizer: str = "Adam"
    precision: str = "float32"
    replicas: int = 1
    arguments: tuple[tuple[str, Any], ...] = ()

    @property
    def batch(self) -> int:
        """The global batch size."""
        return 32 if self.network == "ResNet-50" else 64

    @property
    def is_bare(self) -> bool:
        """Whether the bare loop does all that the row names."""
        is_plain = self.optimizer == "Adam" and not self.arguments
        return is_plain and self.precision != "mixed_float16"

    def __str__(self) -> str:
        return f"{self.network}: {self.change}" if self.change else self.network


ROWS = (
    Row("MLP"),
    *(Row("MLP", name, name) for name in ("SGD", "AdamW", "LARS", "LAMB")),
    Row("MLP", "mixed_float16", precision="mixed_float16"),
    Row("MLP", "mixed_bfloat16", precision="mixed_bfloat16"),
    Row("MLP", "accumulation over 2", arguments=(("accumulation_steps", 2),)),
    Row("MLP", "clip_norm", arguments=(("clip_norm", 1.0),)),
    Row("MLP", "weight average", arguments=(("weight_average", 0.99),)),
    Row("MLP", "data made on the host", arguments=(("data_on_device", False),)),
    Row("MLP", "mirrored on 2", replicas=2),
    Row("CNN"),
    Row("CNN", "mirrored on 2", replicas=2),
    Row("GPT"),
    Row("GPT", "mixed_bfloat16", precision="mixed_bfloat16"),
    Row("ResNet-50"),
    Row("ResNet-50", "mirrored on 2", replicas=2),
)


def network(row: Row) -> tuple[keras.Model, tuple[np.ndarray, np.ndarray]]:
    """Builds the model of a row, up to the logits; and 256 examples of zeros: inputs, labels."""
    labels, shape = np.zeros(256, "i8"), (28, 28, 1)
    if row.network == "GPT":
        sizes = {"width": 64, "heads": 4, "blocks": 2, "dropout": 0.0}
        tokens = np.zeros([256, 32], "i8")
        return ddl.models.gpt(256, 32, **sizes), (tokens, tokens)
    if row.network == "ResNet-50":
        return ddl.models.resnet((64, 64, 3), 1000), (np.zeros([256, 64, 64, 3], "u1"), labels)
    if row.network == "MLP":
        return ddl.models.mlp(shape, 10), (np.zeros([256, *shape], "u1"), labels)
    sizes = {"blocks": ((16, 16),), "hidden_units": (), "batch_normalization": True}
    return ddl.models.cnn(shape, 10, **sizes), (np.zeros([256, *shape], "u1"), labels)


def _strategy(row: Row) -> tf.distribute.Strategy:
    """Sets the precision, and returns the strategy of a row."""
    keras.utils.clear_session()  # also of its precision
    set_precision(row.precision)
    if row.replicas == 1:
        return tf.distribute.OneDeviceStrategy(DEVICE)
    return tf.distribute.MirroredStrategy([f"CPU:{1 + i}" for i in range(row.replicas)])


def trainer_of(row: Row) -> ddl.Trainer:
    """Builds the trainer of a row. The GPU's path must be taken."""
    strategy = _strategy(row)
    module = ddl.optimizers if hasattr(ddl.optimizers, row.optimizer) else keras.optimizers
    arguments = dict(row.arguments)
    if "weight_average" in arguments:
        arguments["weight_average"] = ddl.ExponentialMovingAverage(arguments["weight_average"])
    with strategy.scope():
        model, (inputs, labels) = network(row)
        is_gpt = row.network == "GPT"
        task = ddl.LanguageModel(model) if is_gpt else ddl.Classification(model)
        names = ("token", "next_token") if is_gpt else ("image", "label")
        return ddl.Trainer(
            task,
            getattr(module, row.optimizer)(1e-3),
            dict(zip(names, (inputs, labels), strict=True)),
            global_batch_size=row.batch,
            strategy=strategy,
            jit_compile="off",
            **arguments,
        )


def update_of(row: Row) -> Update:
    """Counts an update of ddl."""
    with taking(GPU):
        trainer = trainer_of(row)
        graph = trainer._runner.loop._concrete(trainer.state).graph
    return count(graph, trainer.accumulation_steps)


def bare_update_of(row: Row) -> Update:
    """Counts an update of the bare loop."""
    strategy = _strategy(row)
    with strategy.scope():
        model, arrays = network(row)
        for layer in model.layers:
            if isinstance(layer, keras.layers.BatchNormalization):
                layer.synchronized = row.replicas > 1  # as in ddl
        variables = [v.value for v in model.trainable_variables]
        slots = contenders.slots_of(variables)
        number = tf.Variable(0, trainable=False, dtype=tf.int64)

    def on_replica(inputs: tf.Tensor, labels: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
        inputs, labels = tf.gather(inputs, rows), tf.gather(labels, rows)
        with tf.GradientTape() as tape:
            each, logits = contenders.losses(model, inputs, labels)
            loss = tf.reduce_sum(each) / (row.batch * each.shape[1:].num_elements())
        gradients = [tf.convert_to_tensor(g) for g in tape.gradient(loss, variables)]
        if row.replicas > 1:
            gradients = tf.distribute.get_replica_context().all_reduce("SUM", gradients)
        contenders.adam_update(variables, slots, gradients, number.assign_add(1))
        right = tf.equal(tf.argmax(logits, -1), labels)
        return tf.stack([loss, tf.reduce_sum(tf.cast(right, tf.float32))])

    @tf.function(autograph=False)
    def loop(inputs: tf.Tensor, labels: tf.Tensor, order: tf.Tensor) -> tf.Tensor:
        def turn(index: tf.Tensor, total: tf.Tensor) -> Any:
            with tf.device(DEVICE):
                own = inputs, labels, order[index]
            figures = strategy.run(on_replica, args=own)
            with tf.device(HOST):
                index += 1
            with tf.device(DEVICE):
                return index, total + strategy.reduce("SUM", figures, axis=None)

        def goes_on(index: tf.Tensor, _: tf.Tensor) -> tf.Tensor:
            with tf.device(HOST):
                return index < 10

        return tf.while_loop(goes_on, turn, (tf.constant(0), tf.zeros([2])))[1]

    order = tf.zeros([10, row.batch // row.replicas], tf.int64)
    return count(loop.get_concrete_function(*map(tf.constant, arrays), order).graph)


def measure(options: Options) -> Report:
    """Traces one row after the other."""
    distribution.configure_devices(4, gpus=())
    rows: list[list[Cell]] = []
    targets = []
    for row in options.chosen(ROWS)[: 1 if options.quick else None]:
        update = update_of(row)
        bare: Cell = "–"
        ratio: Cell = "–"
        if row.is_bare:
            bare = bare_update_of(row).operations
            ratio = round(update.operations / bare, 2)
            targets.append(Target(f"{row}: operations / the bare loop's", ratio, WORSE, "at most"))
        own = update.operations, update.operations - update.library_calls, update.library_calls
        rows.append([str(row), *own, bare, ratio, update.crossing, len(set(update.on_host))])
    columns = ["", "operations", "kernels", "library calls", "bare loop", "ratio"]
    columns += ["bytes across", "left to the host"]
    return Report([Table("An update", columns, rows)], targets)


if __name__ == "__main__":
    harness.main(measure)
