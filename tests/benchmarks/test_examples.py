"""The commands and the measures of `benchmarks.examples`."""

import json

import numpy as np
import pytest

from benchmarks import example_runs, examples, generated_digits
from benchmarks.example_runs import ROOT, Run, Runs, commands_of


@pytest.mark.parametrize("example", examples.EXAMPLES)
def test_the_last_command_of_a_header_trains(example):
    *earlier, last = commands_of(ROOT / f"examples/{example}.gin")
    assert f"--gin_file=examples/{example}.gin" in last
    assert f"--model_dir=runs/{example}" in last
    assert all(command[:3] == ["python", "-m", "ddl.main"] for command in [*earlier, last])


@pytest.mark.parametrize("example", examples.EXAMPLES)
def test_each_example_is_compared(example):
    assert callable(getattr(examples.Examples, f"_{example}"))


def test_each_command_runs_once_and_further_parameters_in_a_folder_of_their_own(
    tmp_path, monkeypatch
):
    started = []
    monkeypatch.setattr(example_runs, "start", lambda command, folder: started.append(command))
    runs = Runs(tmp_path, quick=False)
    first = runs("examples/distillation.gin")
    assert len(started) == 3
    assert runs("examples/distillation.gin") is first
    other = runs("examples/distillation.gin", "SEED = 1")
    assert len(started) == 4
    assert "--gin_param=SEED = 1" in started[-1]
    assert other.model_dir.parent == first.model_dir.parent
    assert other.model_dir != first.model_dir
    assert (tmp_path / "examples" / "distillation.gin").exists()


def test_lines_are_those_of_the_split(tmp_path):
    lines = [{"step": 1, "split": "train"}, {"step": 2, "split": "eval", "accuracy": 0.5}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = Run(["--model_dir=."], tmp_path, 1.0)
    assert run.lines("eval") == [{"step": 2, "accuracy": 0.5}]


def test_a_failed_command_shows_its_output(tmp_path):
    with pytest.raises(RuntimeError, match="No module named nothing_of_this_name"):
        example_runs.start(["python", "-m", "nothing_of_this_name"], tmp_path)


def test_the_distance_of_normal_distributions():
    random = np.random.default_rng(0)
    one = random.normal(size=(1000, 3)) @ random.normal(size=(3, 3))
    assert generated_digits.distance(one, one) == pytest.approx(0, abs=1e-9)
    assert generated_digits.distance(one, one + np.array([3, 4, 0])) == pytest.approx(25)
    deviations = np.linalg.eigvalsh(np.cov(one, rowvar=False)) ** 0.5
    assert generated_digits.distance(one, 3 * one - 2 * one.mean(axis=0)) == pytest.approx(
        np.sum((2 * deviations) ** 2)
    )


def test_ten_labels_suffice_for_features_that_are_the_labels():
    labels = {}
    for split in ("train", "test"):
        for image, label in zip(*examples.ddl.data.load_digits(split), strict=True):
            labels[image.tobytes()] = label

    def perfect(images):
        return np.eye(10)[[labels[image.astype(np.uint8).tobytes()] for image in images]]

    assert examples.with_ten_labels(perfect) == 100
    assert 5 < examples.with_ten_labels(lambda images: np.arange(len(images))[:, None] ** 2) < 15


def test_images_keep_their_pixels_for_the_picture():
    digits = generated_digits.digits("test")
    shown = generated_digits.shown("digits", digits)
    pixels = np.array([[int(pixel, 16) for pixel in image] for image in shown.pixels])
    np.testing.assert_allclose(pixels / 15, digits[:30].reshape(-1, 64), atol=1 / 30)
