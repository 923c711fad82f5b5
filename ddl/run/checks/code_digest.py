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
    own = {_folder(loaded[name]) for name in given if name in loaded}
    own = {folder for folder in own if not is_of_library(str(folder / "module.py"))}
    digests = {}
    for name, files in by_package.items():
        if name in loaded and (name in given or _is_beside(loaded[name], own, name)):
            digests[name] = code_digest(loaded[name])
        elif name in given:  # a folder without __init__.py, which may hold anything else
            digest = hashlib.sha256()
            for file in sorted(files):
                digest.update(code_digest(file).encode())
            digests[name] = digest.hexdigest()[:12]
    return [f"{name}, code {digests[name]}" for name in sorted(digests)]


def _is_beside(file: Path, folders: Collection[Path], name: str) -> bool:
    is_own = name not in _KNOWN and not is_of_library(str(file))
    return is_own and any(folder in file.parents for folder in folders)


def _file(module: ModuleType | None) -> Path | None:
    """Returns the Python file of a module; None if it has none that can be read."""
    name = getattr(module, "__file__", None)
    if not isinstance(name, str) or not name.endswith(".py"):
        return None
    path = Path(name).absolute()
    return path if path.is_file() else None


def _folder(file: Path) -> Path:
    """Returns the folder from which a top-level module or package was imported."""
    return file.parent.parent if file.name == "__init__.py" else file.parent
