"""That all workers of a cluster were started alike: version, code, config, flags."""

import hashlib
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import ddl
from ddl import config
from ddl.errors import ConfigError
from ddl.workers import Workers


def check_same_on_all(workers: Workers, flags: Mapping[str, object]) -> None:
    """Compares what the workers run, the seed included. On all of them, before any is trained.

    Args:
      workers: Of the run.
      flags: Those that decide what the workers do together, such as the mode, by name.

    Raises:
      ConfigError: On all if they differ, with what differs.
    """
    if workers.number == 1:
        return
    given = "\n".join(f"--{name}={value}" for name, value in flags.items())
    texts = workers.texts(f"{versions()}\n{given}\n{config.config_text()}")
    for index, text in enumerate(texts[1:], start=1):
        here, there = texts[0].splitlines(), text.splitlines()
        differ = sorted({*here} ^ {*there})
        if differ:
            listing = "\n".join(
                f"  {'worker 0' if line in here else f'worker {index}'}: {line}" for line in differ
            )
            raise ConfigError(f"worker {index} was started otherwise than worker 0:\n{listing}")


def versions() -> str:
    """Versions of what computes, and digests of the code of ddl and of what the config imports."""
    package = Path(ddl.__file__).parent
    lines = [
        f"ddl {ddl.__version__}, code {_digest(package)}",
        f"TensorFlow {tf.__version__}, Keras {keras.__version__}, NumPy {np.__version__}",
        "Python {}.{}".format(*sys.version_info),
    ]
    for name in re.findall(r"^import ([\w.]+)", config.config_text(), re.MULTILINE):
        module = sys.modules.get(name)
        if module is not None and getattr(module, "__file__", None):
            lines.append(f"{name}, code {_digest(Path(str(module.__file__)))}")
    return "\n".join(lines)


def _digest(path: Path) -> str:
    """Of a file, or of all Python files and configs of a package: 12 hexadecimal digits."""
    root = path.parent if path.name == "__init__.py" else path
    files = [path] if root.is_file() else sorted([*root.rglob("*.py"), *root.rglob("*.gin")])
    digest = hashlib.sha256()
    for file in files:
        digest.update(str(file.relative_to(root) if file != root else file.name).encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]
