"""Real runs that are asked to stop, or find their newest checkpoint damaged."""

import shutil

import pytest

from tests.run.whole_runs import MODES, assert_same_end, finish, start


def damage(path, how):
    content = path.read_bytes()
    middle = len(content) // 2
    if how == "truncated":
        path.write_bytes(content[:middle])
    else:
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 255]) + content[middle + 1 :])


@pytest.mark.slow
@pytest.mark.parametrize(
    "damages",
    [
        {240: ("index", "truncated"), 225: ("data-00000-of-00001", "flipped")},
        {240: ("data-00000-of-00001", "truncated"), 225: ("index", "flipped")},
    ],
    ids=str,
)
def test_damaged_checkpoints_cost_the_steps_since_the_one_before(tmp_path, straight, damages):
    mode = "float32 one_device"
    reference, _ = straight(mode)
    model_dir = tmp_path / "run"
    shutil.copytree(reference, model_dir)
    for step, (end, how) in damages.items():
        damage(model_dir / "checkpoints" / f"step-{step}.{end}", how)
    status, output = finish(start(model_dir, *MODES[mode]))
    assert status == 0, output
    for step, (end, _) in damages.items():
        assert f"step-{step} is damaged" in output
        folder = model_dir / "checkpoints" / "damaged" / f"step-{step}"
        assert (folder / f"step-{step}.{end}").exists()
    assert output.count("and was moved to") == 2
    assert "Restored step 210" in output
    assert_same_end(model_dir, reference)


@pytest.mark.slow
def test_without_a_good_checkpoint_nothing_is_begun_again(tmp_path, straight):
    mode = "float32 one_device"
    model_dir = tmp_path / "run"
    shutil.copytree(straight(mode)[0], model_dir)
    for index in (model_dir / "checkpoints").glob("*.index"):
        damage(index, "truncated")
    before = {path: path.stat().st_mtime_ns for path in sorted(model_dir.rglob("*"))}
    for _ in range(2):
        status, output = finish(start(model_dir, *MODES[mode]))
        assert status == 1
        assert "No checkpoint in" in output
        assert "Traceback" not in output
    assert {path: path.stat().st_mtime_ns for path in sorted(model_dir.rglob("*"))} == before
