"""Items that the configs of these tests name."""

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

import gin


class Judge(Protocol):
    name: str

    def verdict(self) -> str: ...


@gin.register(module="items")
class Lenient:
    def __init__(self):
        self.name = "lenient"

    def verdict(self) -> str:
        return "fine"


@gin.register(module="items")
class Mute:
    pass


gin.constant("items.LIMIT", 7)


@gin.constants_from_enum(module="items")
class Color(enum.Enum):
    RED = 1


@gin.register(module="items")
class Trial:
    def __init__(
        self,
        judge: Judge | None = None,
        steps: int | None = None,
        rate: float = 0.1,
        shape: tuple[int, ...] = (),
        mode: Literal["train", "eval"] = "train",
        names: Sequence[str] = (),
        limits: Mapping[str, float] | None = None,
        factor: int = None,  # noqa: RUF013 - the annotation that is so often written
        schedule: Callable[[int], float] | None = None,
        kind: type | None = None,
        other: Any = None,
        pictures=(),
    ):
        if rate < 0:
            raise ValueError(f"rate is {rate}, below 0")
        self.values = dict(locals(), self=None)


@gin.register(module="items")
def tower(filters=(), width: int = 8):
    return "tower", filters, width


@gin.register(module="items")
def cabin(height=1):
    return "cabin", height


@gin.register(module="items")
def pictures(split, size=3):
    return split, size


@gin.register(module="items")
def halving(step: int, every: int = 10) -> float:
    return 0.5 ** (step // every)


@gin.register("Twin", module="items.left")
def left_twin():
    pass


@gin.register("Twin", module="items.right")
def right_twin():
    pass
