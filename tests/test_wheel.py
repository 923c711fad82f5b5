"""A wheel holds all that a run needs: the configs, the digits, the types."""

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_a_wheel_runs_a_shipped_config_from_an_empty_folder(tmp_path):
    build = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)]
    subprocess.run([sys.executable, *build], check=True)
    (wheel,) = tmp_path.glob("ddl-*.whl")
    site, empty = tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    assert (site / "ddl" / "py.typed").exists()
    shipped = {path.name for path in (site / "ddl" / "configs").glob("*.gin")}
    assert shipped == {path.name for path in (ROOT / "configs").glob("*.gin")}
    program = "import ddl, ddl.main; print(ddl.__file__); ddl.main.run()"
    run = subprocess.run(
        [sys.executable, "-c", program, "--gin_file=digits_cnn.gin", "--dry_run"],
        cwd=empty,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(site), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert str(site) in run.stdout
    assert "One step on one batch" in run.stdout
