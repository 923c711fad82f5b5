"""Digests of code, which tell whether two runs used the same."""

import hashlib
import sys
from collections.abc import Collection
from pathlib import Path
from types import ModuleType

from ddl.user_code import is_of_library

# The packages whose versions, or digest, are compared anyway.
_KNOWN = {"ddl", "keras", "tensorflow", "gin", "builtins"}


def code_digest(path: Path) -> str:
    """Returns the first 12 hexadecimal digits of the SHA-256 digest of code.

    Args:
      path: A file, a package's folder or its `__init__.py`. The digest of a package covers all its
        Python files and gin configs.
    """
    root = path.parent if path.name == "__init__.py" else path
    files = [path] if root.is_file() else sorted([*root.rglob("*.py"), *root.rglob("*.gin")])
    digest = hashlib.sha256()
    for file in files:
        digest.update(str(file.relative_to(root) if file != root else file.name).encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def user_code_digests(names: Collection[str]) -> list[str]:
    """Returns a line with a digest for each package and module of the user's code.

    Covers the given packages as a whole, and what was imported from the folders that hold them: a
    module beside a single-file module is as much a part of the model.

    Args:
      names: Names of imported modules, such as those that the config imports. Those of ddl, Keras
        and TensorFlow are left out.
    """
    given = {name.partition(".")[0] for name in names} - _KNOWN
    loaded = {name: file for name, module in [*sys.modules.items()] if (file := _file(module))}
    by_package: dict[str, list[Path]] = {}
    for name, file in loaded.items():
        by_package.setdefault(name.partition(".")[0], []).append(file)
    own = {_root(name, file) for name, file in loaded.items() if name.partition(".")[0] in given}
    own = {folder for folder in own if not is_of_library(str(folder / "module.py"))}
    digests = {}
    for name, files in by_package.items():
        if name not in given and (name in _KNOWN or not _is_beside(files[0], own)):
            continue
        if name in loaded:
            digests[name] = code_digest(loaded[name])
        else:  # a folder without __init__.py, which may hold anything else
            each = "".join(code_digest(file) for file in sorted(files))
            digests[name] = hashlib.sha256(each.encode()).hexdigest()[:12]
    return [f"{name}, code {digests[name]}" for name in sorted(digests)]


def _is_beside(file: Path, folders: Collection[Path]) -> bool:
    return any(folder in file.parents for folder in folders) and not is_of_library(str(file))


def _file(module: ModuleType | None) -> Path | None:
    """Returns the Python file of a module; None if it has none that can be read."""
    name = getattr(module, "__file__", None)
    if not isinstance(name, str) or not name.endswith(".py"):
        return None
    path = Path(name).absolute()
    return path if path.is_file() else None


def _root(name: str, file: Path) -> Path:
    """Returns the folder of `sys.path` from which a module was imported."""
    module = file.parent if file.name == "__init__.py" else file
    return module.parents[name.count(".")]
