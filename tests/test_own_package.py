"""A user's model, task and data in a file of their own, as README.md shows it."""

import re
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

import ddl
from tests.conftest import make_strategy

ROOT = Path(__file__).parent.parent


def readme_blocks() -> dict[str, str]:
    """The code blocks of README.md that begin by naming the file they stand in."""
    text = (ROOT / "README.md").read_text()
    blocks = re.findall(r"```\w+\n# ([\w.]+\.(?:py|gin))\n(.*?)```", text, re.DOTALL)
    return dict(blocks)


def test_the_example_of_the_readme(tmp_path):
    blocks = readme_blocks()
    assert set(blocks) == {"denoise.py", "denoise.gin", "notebook.py", "jitter.py"}
    own = [*blocks["denoise.py"].splitlines(), *blocks["denoise.gin"].splitlines()]
    assert len([line for line in own if line.strip()]) < 40
    for name, text in blocks.items():
        (tmp_path / name).write_text(text)
    result = subprocess.run(
        [
            sys.executable,
            "-m",
            "ddl.main",
            "--gin_file=denoise.gin",
            "--model_dir=run",
            "--strategy=mirrored",
            "--num_virtual_devices=2",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    losses = [float(x) for x in re.findall(r"eval · loss ([\d.e-]+)", result.stdout)]
    assert losses[-1] < losses[0]


def test_the_notebook_of_the_readme(tmp_path):
    (tmp_path / "notebook.py").write_text(readme_blocks()["notebook.py"])
    result = subprocess.run(
        [sys.executable, "notebook.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "accuracy" in result.stdout


def test_the_random_layer_of_the_readme():
    """Two replicas draw what one device draws."""
    namespace: dict = {}
    exec(readme_blocks()["jitter.py"], namespace)
    results = []
    for place in [("one_device", 1), ("mirrored", 2)]:
        keras.utils.set_random_seed(0)
        strategy = make_strategy(*place)
        with strategy.scope():
            layers = [namespace["Jitter"](), keras.layers.Dense(2)]
            task = ddl.Classification(keras.Sequential([keras.Input((3,)), *layers]))
            optimizer = keras.optimizers.SGD(0.1)
        data = (np.ones([8, 3], "f4"), np.arange(8) % 2)
        trainer = ddl.Trainer(task, optimizer, data, global_batch_size=8, strategy=strategy)
        results.append(trainer.train(3)["loss"])
    assert results[0] == pytest.approx(results[1], rel=1e-6)
