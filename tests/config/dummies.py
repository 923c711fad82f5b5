"""What the configs of these tests configure, and how they ask what is wrong with one."""

import collections.abc
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol

import gin
import keras
import pytest

from ddl.errors import ConfigError, DataError


class Judge(Protocol):
    def verdict(self) -> str: ...


@gin.register(module="dummies")
class Lenient:
    def verdict(self) -> str:
        return "fine"


@gin.register(module="dummies")
class Mute:
    pass


@gin.register(module="dummies")
class Trial:
    def __init__(
        self,
        judge: Judge | None = None,
        tower=None,
        pictures=None,
        steps: int | None = None,
        rate: float = 0.1,
        shape: tuple[int, ...] = (),
        mode: Literal["train", "eval"] = "train",
        names: Sequence[str] = (),
        limits: float | Mapping[str, float | None] | None = None,
        factor: int = None,  # noqa: RUF013 - the annotation that is so often written
        seed: int = 0,
        judges: Sequence[Judge] = (),
        schedule: Callable[[int], float] | None = None,
        kind: type | None = None,
        things: collections.abc.Sequence = (),
        unknown: "NowhereDefined" = None,  # noqa: F821
        optimizer: keras.optimizers.Optimizer | None = None,
    ):
        if rate < 0:
            raise ValueError(f"rate is {rate}, below 0")
        if rate > 100:
            raise DataError(f"rate is {rate}, a strange one")
        self.values = dict(locals())


@gin.register(module="dummies")
def tower(filters, width: int = 8, names=None):
    return ("tower", filters, width, names)


@gin.register(module="dummies")
def pictures(split, size=3, text="a 'quoted' text", tiny=1e-05, nothing=None, pair=(1, "b")):
    return (split, size, text, tiny, nothing, pair)


@gin.register(module="dummies")
def halving(step: int, every: int = 10) -> float:
    return 0.5 ** (step // every)


@gin.register(module="dummies")
def forwarding(momentum=0.0, block_1=None, **kwargs):
    return momentum, kwargs


@gin.register(module="dummies")
def demanding(amount=1, *, of):
    return amount, of


@gin.register("Twin", module="dummies.left")
def left_twin():
    pass


@gin.register("Twin", module="dummies.right")
def right_twin(of):
    pass


@gin.register(module="dummies")
class Parent:
    def __init__(self, amount):
        pass


@gin.register(module="dummies")
class Heir(Parent):
    pass


@gin.register(module="dummies")
class BadHeir(Parent):
    def __init__(self):
        super().__init__()


@gin.register(module="dummies")
def calling(what):
    return what()


@gin.configurable(module="dummies")
class InPlace(keras.layers.Layer):
    def __init__(self, units=3):
        super().__init__()


def complaint(call, *arguments) -> str:
    with pytest.raises(ConfigError) as caught:
        call(*arguments)
    message = str(caught.value)
    assert not re.search(r"\bgin\.[A-Za-z_]|configurable", message)
    assert "Traceback" not in message
    return message
