"""A check that all workers run the same code, versions, config and flags."""

import sys
from collections.abc import Mapping
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import ddl
from ddl import config
from ddl.config.registry import user_packages
from ddl.distribution.workers import Workers
from ddl.errors import ConfigError
from ddl.run.checks.code_digest import code_digest, user_code_digests


def check_same_on_all(workers: Workers, flags: Mapping[str, object]) -> None:
    """Compares code, versions, config and flags of all workers, and a seed that the config binds.

    Eager, cross-replica context, on all workers, before training.

    Args:
      workers: The workers of the run.
      flags: Values by name of the flags that must agree, such as the mode.

    Raises:
      ConfigError: On all workers, with the differing lines, if a worker differs from worker 0.
    """
    if workers.number == 1:
        return
    given = "\n".join(f"--{name}={value}" for name, value in flags.items())
    texts = workers.gather_texts(f"{versions()}\n{given}\n{config.config_text()}")
    for index, text in enumerate(texts[1:], start=1):
        here, there = texts[0].splitlines(), text.splitlines()
        differ = sorted({*here} ^ {*there})
        if differ:
            listing = "\n".join(
                f"  {'worker 0' if line in here else f'worker {index}'}: {line}" for line in differ
            )
            workers.barrier()
            raise ConfigError(
                f"Worker {index} must have the code, versions, config and flags of worker 0, got\n"
                f"{listing}\nStart all workers with the same ones."
            )


def versions() -> str:
    """Returns library versions, and digests of ddl's code and of the config's packages."""
    package = Path(ddl.__file__).parent
    lines = [
        f"ddl {ddl.__version__}, code {code_digest(package)}",
        f"TensorFlow {tf.__version__}, Keras {keras.__version__}, NumPy {np.__version__}",
        "Python {}.{}".format(*sys.version_info),
    ]
    return "\n".join([*lines, *user_code_digests({*config.imported_modules(), *user_packages()})])
