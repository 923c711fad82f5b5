"""Each file of examples/: its command, and a dry run."""

from pathlib import Path

import keras
import pytest

import ddl
from ddl import config
from ddl.run import train
from tests.conftest import make_strategy

ROOT = Path(__file__).parents[2]
PROGRAMS = (ROOT / "examples").glob("*.py")
EXAMPLES = sorted(path.stem for path in PROGRAMS if path.with_suffix(".gin").exists())
SMALL_CNN = ("cnn.blocks = ((8,),)", "cnn.hidden_units = (16,)")
SMALL = {
    "ddpm": ("denoiser.blocks = 1",),
    "tagging": ("lines_of_the_play.length = 8",),
    "u_net": ("unet.widths = (4, 8)",),
    "wgan_gp": ("WganGp.critic_updates = 2",),
}


def text_of(example) -> str:
    return (ROOT / f"examples/{example}.gin").read_text()


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_header_gives_the_command(example):
    header = text_of(example).partition("\n#\n")[0].splitlines()
    assert all(line.startswith("# python -m ddl.main ") for line in header)
    assert f"--gin_file=examples/{example}.gin " in header[-1]
    assert header[-1].endswith(f"--model_dir=runs/{example}")


@pytest.mark.parametrize("example", EXAMPLES)
def test_a_dry_run(example, tmp_path, capsys, monkeypatch):
    """As of `ddl.main`, but for the export of the model, which takes as long as the rest."""
    monkeypatch.setattr(train, "export", lambda *_: None)
    params = list(SMALL.get(example, ()))
    if example == "distillation":
        ddl.models.mlp((8, 8, 1), 10, hidden_units=(4,)).save(tmp_path / "teacher.keras")
        params.append(f"Distill.teacher = '{tmp_path}/teacher.keras'")
    if "include 'digits_cnn" in text_of(example):
        params += SMALL_CNN
    keras.utils.clear_session()  # names as in a new process
    config.load([f"{ROOT}/examples/{example}.gin"], params)
    train.run(train.Placement(make_strategy("one_device", 1)), None, dry_run=True)
    assert "One step on one batch: " in capsys.readouterr().out
