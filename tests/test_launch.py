"""The command line of the launcher."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from absl import flags

from ddl import launch
from ddl.errors import ConfigError

RUN = ("--gin_file=a.gin", "--model_dir=runs/a")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "The flags of ddl.main are missing"),
        (["--num_workers=2", *RUN], "Unknown command line flag 'gin_file'"),
        (["--", *RUN], "--num_workers is required. Pass a number"),
        (["--num_workers=0", "--", *RUN], "--num_workers=0"),
        (["--num_workers=2", "--", "--gin_fil=a.gin"], "'gin_fil'. Did you mean: gin_file"),
        (["--num_workers=2", "--", RUN[0]], "--model_dir is required"),
        (["--num_workers=2", "--", *RUN, "--gpus=x"], "--gpus must be"),
        (["--num_workers=9999", "--pin_gpus", "--", *RUN], "needs 9999 GPUs"),
    ],
    ids=str,
)
def test_bad_input_starts_nothing(arguments, message):
    with pytest.raises((flags.Error, ConfigError), match=message):
        launch.build_cluster(["ddl launch", *arguments])


def test_flags_reach_the_cluster_and_ddl_main(monkeypatch):
    monkeypatch.setattr(launch, "Cluster", lambda *given, **options: (given, options))
    of_main = [*RUN, "--gin.TRAIN_STEPS=3", "--gin_param=train/A.b = 'x y'", "--nodry_run"]
    own = ["--num_workers=2", "--num_ps=3", "--max_restarts=4", "--pin_gpus"]
    (ddl_main, *numbers), options = launch.build_cluster(["ddl launch", *own, "--", *of_main])
    assert ddl_main == [sys.executable, "-m", "ddl.main", *of_main]
    assert numbers == [2, 3]
    checkpoints = Path("runs/a/checkpoints")
    assert options == {"max_restarts": 4, "pin_gpus": True, "checkpoints": checkpoints}
    given = ["ddl launch", "--num_workers=2", "--", *RUN, "--dry_run"]
    assert launch.build_cluster(given)[1]["checkpoints"] is None  # and no other run's


@pytest.mark.parametrize(("ends", "status"), [("return 77", 77), ("raise KeyError('a')", 70)])
def test_the_status_of_the_launcher_which_imports_no_tensorflow(ends, status):
    program = f"""
import sys
sys.modules["tensorflow"] = sys.modules["keras"] = None
from ddl import launch
def run(cluster):
    {ends}
launch.Cluster.run = run
launch.run(["ddl launch", "--num_workers=2", "--", *{RUN!r}])
"""
    root = str(Path(__file__).parent.parent)
    command, environment = [sys.executable, "-c", program], {**os.environ, "PYTHONPATH": root}
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert ended.returncode == status
    assert ("KeyError: 'a'" in ended.stderr) == (status == 70)
