"""Facts on the user's code, recorded while it is traced; `causes` finds the mistake from them."""

import inspect
import random
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import tensorflow as tf

from ddl.checking.recording import Recording
from ddl.user_code import Place, is_of_user

_CLIPS = ("clip_by_norm", "clip_by_global_norm", "clip_by_value")
_DRAWS = re.compile("Random|Rng|Stateful|TruncatedNormal|Multinomial")
_ASSIGNS = ("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp")


class Facts:
    """Collects facts about a run into its recording."""

    def __init__(self, recording: Recording):
        """Collects nothing yet."""
        self._recording = recording
        self._of_replica = threading.local()  # each replica is traced in its own thread

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Notes within the `with` block which calls the user's own lines make."""
        default = type(tf.distribute.get_replica_context())
        classes = [*default.__mro__, *tf.distribute.Strategy.__mro__]
        with ExitStack() as stack:

            def replace(owner: Any, name: str, made: Callable[[Any], Any]) -> None:
                original = inspect.getattr_static(owner, name)
                setattr(owner, name, made(original))
                stack.callback(setattr, owner, name, original)

            for cls in dict.fromkeys(classes):
                if "num_replicas_in_sync" in vars(cls):
                    replace(cls, "num_replicas_in_sync", self._noted("num_replicas"))
                if "replica_id_in_sync_group" in vars(cls):
                    replace(cls, "replica_id_in_sync_group", self._noted("replica_id"))
                if "all_reduce" in vars(cls):
                    replace(cls, "all_reduce", self._called("all_reduce"))
            for name in _CLIPS:
                replace(tf, name, self._called("clip"))
            yield

    def loss_begins(self) -> None:
        """Remembers the state before a loss is traced. Replica context."""
        graph = tf.compat.v1.get_default_graph()
        self._of_replica.begun = len(graph.get_operations()), _generators()

    def loss_ends(self, loss: str) -> None:
        """Notes draws and assignments in the trace of a loss. Replica context."""
        before, generators = self._of_replica.begun
        if generators != _generators():
            self._recording.note_fact("numpy_draw", loss)
        for operation in tf.compat.v1.get_default_graph().get_operations()[before:]:
            if operation.type != "StatefulPartitionedCall" and _DRAWS.search(operation.type):
                self._draw(operation)
            elif operation.type in _ASSIGNS and (place := _innermost(operation)[1]):
                self._recording.note_fact("assign", str(place))

    def _draw(self, operation: tf.Operation) -> None:
        owner, place = _innermost(operation)
        if place is not None and owner in ("keras", "user"):
            self._recording.note_fact("keras_draw" if owner == "keras" else "draw", str(place))

    def _noted(self, kind: str) -> Callable[[property], property]:
        def made(original: property) -> property:
            def get(owner: Any) -> Any:
                self._note_caller(kind)
                return original.fget(owner)  # type: ignore[misc]

            return property(get)

        return made

    def _called(self, kind: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def made(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                self._note_caller(kind)
                return original(*args, **kwargs)

            return call

        return made

    def _note_caller(self, kind: str) -> None:
        """Notes the line that reads a property or calls a function, if it is the user's."""
        frame = sys._getframe(2)
        if is_of_user(frame.f_code.co_filename):
            self._recording.note_fact(kind, str(Place(frame.f_code.co_filename, frame.f_lineno)))


def _innermost(operation: tf.Operation) -> tuple[str, Place | None]:
    """Returns who made an operation, "ddl", "keras" or "user", and the user's innermost line."""
    owner, place = "", None
    for frame in reversed(list(operation.traceback or ())):
        file = frame.filename
        if file.endswith("/ddl/checking/worker.py"):  # further out is what started the process
            break
        if is_of_user(file):
            place = Place(file, frame.lineno)
            owner = owner or "user"
            break
        if not owner and "/ddl/" in file and "/ddl/checking/" not in file:
            owner = "ddl"
        elif not owner and "/keras/" in file and "/tensorflow/python/" not in file:
            owner = "keras"
    return owner, place


def _generators() -> tuple[Any, Any]:
    """Returns the states of the generators of NumPy and Python, for a comparison."""
    of_numpy: Any = np.random.get_state()
    return [*of_numpy[:1], of_numpy[1].tobytes(), *of_numpy[2:]], random.getstate()
