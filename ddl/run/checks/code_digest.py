"""Digests of code, which tell whether two runs used the same."""

import hashlib
from pathlib import Path


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
