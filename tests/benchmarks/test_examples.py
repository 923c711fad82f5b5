"""The commands and the measures of `benchmarks.examples`."""

import json

import keras
import numpy as np
import pytest

from benchmarks import example_runs, examples, generated_digits
from benchmarks.example_runs import ROOT, Run, Runs, commands_of
from benchmarks.examples import Finding
from benchmarks.report import Table


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


def test_targets():
    """A bar that must not be met by an answer that is always the same."""
    constant = examples.constant_answer()
    learned = [
        ("vae", Finding("nats", 280.0, "pixels", 430.0, is_target=True, lower_is_better=True)),
        ("fine_tuning", Finding("accuracy", 88.0, "from scratch", 90.0, is_target=True)),
        ("dp_sgd", Finding("accuracy", constant, constant=constant)),
        ("sam", Finding("accuracy", 98.9, constant=constant)),
    ]
    slowest, *bars = examples.report([["vae", 100, 30.0]], learned).bars
    assert slowest.verdict == "met"
    assert [bar.verdict for bar in bars] == ["met", "missed", "missed", "met"]
    assert [bar.value for bar in bars[:3]] == [-150, -2, 1]


def test_each_generator_has_a_target():
    rows = [["training digits", 0.1], ["GAN", 6.0], ["VAE", 1.5], ["independent pixels", 3.0]]
    bars = examples.bars_of_generators(Table("digits", ["source", "distance"], rows))
    assert [(bar.what.partition(":")[0], bar.value, bar.verdict) for bar in bars] == [
        ("GAN", 2.0, "missed"),
        ("VAE", 0.5, "met"),
    ]


def test_the_best_constant_answer():
    labels = list(examples.ddl.data.load_digits("test")[1])
    counts = [labels.count(digit) for digit in range(10)]
    assert examples.constant_answer() == pytest.approx(100 * max(counts) / 360)
    odd = sum(counts[1::2])
    assert examples.constant_answer(2) == pytest.approx(100 * max(odd, 360 - odd) / 360)


def test_the_highest_loss_nearby():
    """Along the gradient it is above the loss here, and above that along any other direction."""
    keras.utils.set_random_seed(0)
    scaled = [keras.layers.Rescaling(1 / 16), keras.layers.Flatten(), keras.layers.Dense(10)]
    model = keras.Sequential([keras.Input((8, 8, 1)), *scaled])
    weights = model.get_weights()
    highest = examples.loss_nearby(model, 0.1)
    changes = [a - b for a, b in zip(model.get_weights(), weights, strict=True)]
    moved = np.concatenate([np.ravel(change) for change in changes])
    assert np.linalg.norm(moved) == pytest.approx(0.1, rel=1e-3)
    random = np.random.default_rng(0)
    for _ in range(3):
        directions = [random.normal(size=w.shape) for w in weights]
        norm = np.linalg.norm(np.concatenate([np.ravel(d) for d in directions]))
        model.set_weights([w + 0.1 / norm * d for w, d in zip(weights, directions, strict=True)])
        assert examples.loss_nearby(model, 0.0) < highest


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
