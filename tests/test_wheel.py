"""A wheel holds all that a run needs: the configs, the digits, the types."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.processes  # pip may have to fetch what builds the wheel
def test_a_wheel_finds_a_shipped_config_from_an_empty_folder(tmp_path):
    build = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)]
    subprocess.run([sys.executable, *build], check=True)
    (wheel,) = tmp_path.glob("ddl-*.whl")
    site, empty = tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    kept = [
        path
        for path in (ROOT / "ddl").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    ]
    assert all((site / path.relative_to(ROOT)).exists() for path in kept)  # data of ddl, too
    shipped = {path.name for path in (site / "ddl" / "configs").glob("*.gin")}
    assert shipped == {path.name for path in (ROOT / "configs").glob("*.gin")}
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(site), "HOME": str(tmp_path)}
    # Refused when the config and its includes were read, which does without TensorFlow.
    program = "import ddl.main; print(ddl.main.__file__); ddl.main.run()"
    command = [sys.executable, "-c", program, "--gin_file=digits_cnn.gin", "--dry_run"]
    options = {"cwd": empty, "env": environment, "text": True, "capture_output": True}
    ended = subprocess.run([*command, "--gin.LEARNING_RAT=1"], check=False, **options)
    assert ended.stdout == f"{site}/ddl/main.py\n"
    assert "LEARNING_RAT is never used. Did you mean LEARNING_RATE?" in ended.stderr
