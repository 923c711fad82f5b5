"""Every command and every code block of the documents does what it is shown for."""

import os
import re
import runpy
import shlex
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from pyarrow import csv, parquet

import ddl
from ddl.checkpoints.export import export_model
from ddl.optimizers.loss_weight import loss_weights
from tests.conftest import make_strategy
from tests.documents.pages import PAGES, ROOT, blocks, commands, files
from tests.processes import forked
from tests.run.test_train import run

DRY = "tests/run/test_configs.py makes a dry run of every config in one process"
# Commands that are not run here, and why.
NOT_RUN = {
    "make demo": "installs an environment; its training is that of README's second command",
    "make test": "runs this test",
    "make check": "runs this test",
    "python -m ddl.main --gin_file=configs/digits_cnn.gin --dry_run": DRY,
    "python -m ddl.main --gin_file=configs/mnist_mlp.gin --gin_param=\"DATA = 'synthetic'\" "
    "--dry_run": DRY,
    "grep sha256 runs/a/checkpoints/step-*.json runs/b/checkpoints/step-*.json": "reads two runs; "
    "tests/step/shards/test_same_bits.py compares digests",
    "python -m benchmarks parity": "takes minutes; tests/training/test_parity.py runs "
    "some of its cases",
}


def grouped() -> dict[str, list[str]]:
    """Returns the commands to run, those of one model directory together and in order.

    A command that only reads a directory, such as an evaluation, comes after the training.
    """
    groups: dict[str, list[str]] = {}
    for command in commands():
        if command not in NOT_RUN:
            directory = re.search(r"--model_dir=(\S+)", command)
            groups.setdefault(directory[1] if directory else command, []).append(command)
    for group in groups.values():
        only_reads = re.compile(r"--mode=(eval|export|predict)")
        group.sort(key=lambda command: bool(only_reads.search(command)))
    return groups


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A folder that holds the configs, the files that the documents show, and nothing of a run."""
    for name in ("configs", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    for name, text in files().items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_what_is_not_run_is_still_on_a_page():
    assert set(NOT_RUN) <= set(commands())


@pytest.mark.slow
@pytest.mark.parametrize("group", grouped())
def test_commands(group, folder):
    for command in grouped()[group]:
        arguments = [*shlex.split(command), *shorter(command)]
        if arguments[0] == "ddl":
            arguments = ["python", "-m", "ddl", *arguments[1:]]
        assert arguments[0] == "python", f"{command}: run it here, or say in NOT_RUN why not"
        result = forked.run(
            [sys.executable, *arguments[1:]],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, (
            f"{command}\n{result.stdout[-1500:]}\n{result.stderr[-1500:]}"
        )
        if "denoise.gin" in command:
            losses = [float(x) for x in re.findall(r"eval · loss ([\d.e-]+)", result.stdout)]
            assert losses[-1] < losses[0]
        if "beside_keras" in command:
            check_beside_keras(result.stdout)


def shorter(command: str) -> list[str]:
    """Returns flags that shorten a training with a shipped config to its first evaluation."""
    is_run = re.match(r"python -m ddl\.(main|launch) .*--gin_file=configs/digits_cnn\.gin", command)
    return ["--gin_param=TRAIN_STEPS = 200"] if is_run else []


def check_beside_keras(output: str) -> None:
    """README shows what the program prints for Keras; differences of ddl are mere rounding."""
    rows = re.findall(r"^(.*\S) +(\S+) +(\S+)$", output, re.M)[1:]
    assert len(rows) == 4, output
    readme = (ROOT / "README.md").read_text()
    shown = re.findall(r"^\| [^|]+ \| (\de-\d+) \| (\de-\d+) \|", readme, re.M)
    of_keras = [float(by_keras) for _, by_keras, _ in rows[1:]]
    assert of_keras == [float(by_keras) for by_keras, _ in shown], output
    assert all(float(by_ddl) < 1e-12 for *_, by_ddl in [*rows, *shown]), output


GIN = [block for page in PAGES for block in blocks(page) if block.language == "gin"]


@pytest.mark.parametrize("block", GIN, ids=lambda block: block.page.name)
def test_configs(block, folder, capsys):
    """A config trains one step. One without an `include` adds to digits.gin and replaces there."""
    text, unused = block.text, ()
    if "include" not in text:
        text, unused = f"include 'digits.gin'\n{text}", ("SGD.*", "LEARNING_RATE")
    if "train_data" in text:  # in place of the digits
        unused += ("images.*", "train/images.*", "test/images.*")
    if re.search(r"model = @(?!cnn|teacher)", text):
        unused += ("cnn.*",)
    if "Trainer.task" in text:
        unused += ("Classification.*",)
    write_data(folder / "data")
    if "WarmStart" in text:
        run(folder / "runs" / "digits")
        capsys.readouterr()
    (folder / "block.gin").write_text(text)
    if "batch_shards" in text:  # sets up TensorFlow as this process must not
        output = dry_run_elsewhere(folder / "block.gin")
    else:
        run_block(folder / "block.gin", unused)
        output = capsys.readouterr().out
    assert "One step on one batch: loss" in output


def write_data(folder: Path) -> None:
    """Writes the files that docs/data.md reads."""
    random = np.random.default_rng(0)
    images, labels = random.integers(0, 16, (64, 8, 8, 1)).astype("u1"), np.arange(64) % 2
    folder.mkdir(exist_ok=True)
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        encoded = tf.io.encode_png(image)
        for part in ("train", "test"):
            file = folder / "images" / part / ("cat", "dog")[label] / f"{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            tf.io.write_file(str(file), encoded)
    np.save(folder / "images.npy", images)
    np.save(folder / "labels.npy", labels)
    np.savez(folder / "test.npz", x_test=images, y_test=labels)
    (folder / "text.txt").write_text("The quick brown fox jumps over the lazy dog.\n" * 20)
    rows = [f"{20 + n},{n}.5,{('red', 'blue')[n % 2]},{('yes', 'no')[n % 2]}" for n in range(64)]
    (folder / "test.csv").write_text("\n".join(["age,income,colour,bought", *rows]))
    parquet.write_table(csv.read_csv(folder / "test.csv"), folder / "train.parquet")
    for name in ("train-0.tfrecord", "test.tfrecord"):
        with tf.io.TFRecordWriter(str(folder / name)) as records:
            for image, label in zip(images, labels, strict=True):
                records.write(serialized(image, label))


def serialized(image: np.ndarray, label: int) -> bytes:
    encoded = tf.train.BytesList(value=[tf.io.encode_png(image).numpy()])
    of_label = tf.train.Int64List(value=[label])
    feature = {
        "image/encoded": tf.train.Feature(bytes_list=encoded),
        "image/class": tf.train.Feature(int64_list=of_label),
    }
    return tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString()


def run_block(path: Path, unused: tuple[str, ...]) -> None:
    """Makes a dry run in this process, which has TensorFlow already."""
    from ddl import config
    from ddl.distribution import Communication
    from ddl.run import train

    config.load([str(path)])
    placement = train.Placement(make_strategy("one_device", 1), Communication())
    train.run(placement, None, dry_run=True, allow_unused=unused)


def dry_run_elsewhere(path: Path) -> str:
    """Makes a dry run in a process of its own; returns what it printed."""
    result = forked.run(
        [sys.executable, "-m", "ddl.main", f"--gin_file={path}", "--dry_run"],
        cwd=path.parent,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.slow
def test_the_notebook(folder):
    result = forked.run(
        [sys.executable, "notebook.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "accuracy" in result.stdout


def trained_with(layer, replicas):
    """Trains a layer and a dense one for 3 updates; returns the trainer and the mean loss."""
    keras.utils.set_random_seed(0)
    strategy = make_strategy("mirrored" if replicas > 1 else "one_device", replicas)
    with strategy.scope():
        layers = [layer(), keras.layers.Dense(2)]
        task = ddl.Classification(keras.Sequential([keras.Input((3,)), *layers]))
        optimizer = keras.optimizers.SGD(0.1)
    rows = np.arange(24, dtype="f4").reshape(8, 3) / 24
    data = (rows, np.arange(8) % 2)
    trainer = ddl.Trainer(task, optimizer, data, global_batch_size=8, strategy=strategy)
    return trainer, trainer.train(3)["loss"]


def test_the_random_layer(tmp_path):
    """Two replicas draw what one device draws, and an export loads."""
    namespace: dict = {}
    exec(files()["jitter.py"], namespace)
    (_, one), (trainer, two) = (trained_with(namespace["Jitter"], replicas) for replicas in (1, 2))
    assert one == pytest.approx(two, rel=1e-6)
    exported, _ = export_model(trainer.model, tmp_path)
    keras.models.load_model(exported)


def test_the_layer_that_sums_over_the_replicas():
    """Two replicas keep the mean that one device keeps."""
    namespace: dict = {}
    exec(files()["centering.py"], namespace)
    results = [trained_with(namespace["Centering"], replicas) for replicas in (1, 2)]
    assert results[0][1] == pytest.approx(results[1][1], rel=1e-6)
    means = [trainer.model.layers[0].mean.numpy() for trainer, _ in results]
    mean = (np.arange(24).reshape(8, 3) / 24).mean(0) * (1 - 0.9**3)
    np.testing.assert_allclose(means, [mean, mean], rtol=1e-5)


def test_the_layer_that_looks_up_rows():
    namespace: dict = {}
    exec(files()["item_vectors.py"], namespace)
    layer = namespace["ItemVectors"]()
    found = layer(np.array([[3, 7], [999_999, 3]]))
    np.testing.assert_array_equal(found, layer.table.numpy()[[[3, 7], [999_999, 3]]])


def test_the_gan(folder, capsys):
    runpy.run_path("my_gan.py")
    assert "loss/real_or_fake" in capsys.readouterr().out


def test_losses_across_examples(folder, capsys):
    runpy.run_path("info_nce.py")
    assert "loss" in capsys.readouterr().out
    task = runpy.run_path("annealed.py")["Annealed"]
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    trainer = ddl.Trainer(task(model), sgd(), {"image": np.ones([8, 3], "f4")}, global_batch_size=8)
    assert np.isfinite(trainer.train(2)["loss"])
    assert loss_weights(trainer.task, 2) == {"loss_weight/sparsity": pytest.approx(1e-3)}


def test_continued_text(folder, capsys):
    runpy.run_path("continued.py")
    assert len(capsys.readouterr().out) == 61


def test_item_vectors():
    namespace: dict = {}
    exec(files()["item_vectors.py"], namespace)
    assert namespace["ItemVectors"]()(np.array([1, 999_999])).shape == (2, 32)


def test_split_items():
    namespace: dict = {}
    smaller = files()["split_items.py"].replace("10_000_000", "1_000_000")
    exec(smaller, namespace)
    model = namespace["model"]
    assert [len(v.shape) for v in model.weights] == [2] * 65 + [1]
    assert model(np.array([1, 999_999])).shape == (2, 1)


def test_metrics(folder, capsys):
    trainer = runpy.run_path("areas.py")["trainer"]
    found = trainer.history[-1]
    assert found["auc"] == pytest.approx(found["auc_by_ranks"], abs=0.01)
    assert found["perplexity"] == np.exp(found["loss"])
    assert len(capsys.readouterr().out.splitlines()) == 2


def sgd():
    return keras.optimizers.SGD(0.1)


# The optimizers of each step that docs/own-step.md shows without its losses.
OWN_STEPS = {
    "sharp.py": sgd,
    "surgery.py": sgd,
    "private.py": sgd,
    "two_sources.py": sgd,
}


@pytest.mark.parametrize("name", OWN_STEPS)
def test_the_steps(name):
    namespace: dict = {}
    exec(files()[name], namespace)
    layers = [keras.layers.Dense(4), keras.layers.Dense(2)]
    classification = ddl.Classification(keras.Sequential([keras.Input((3,)), *layers]))
    (shown,) = [cls for cls in namespace.values() if isinstance(cls, type) and hasattr(cls, "step")]

    class Shown(shown):
        backbone, head = layers

        def __init__(self):
            self.model = classification.model

        def per_example(self, features, training):
            return classification.per_example(features, training)

        classifies = per_example

        def first_loss(self, features, training):
            return self.per_example(features, training)._replace(metrics={})

        agrees = first_loss

        def second_loss(self, features, training):
            output = self.first_loss(features, training)
            return output._replace(loss=-output.loss)

    task = shown(classification) if name == "sharp.py" else Shown()
    data = {"image": np.ones([8, 3], "f4"), "label": np.arange(8) % 2}
    if name == "two_sources.py":
        data = {source: data for source in ("labelled", "unlabelled")}
    trainer = ddl.Trainer(task, OWN_STEPS[name](), data, global_batch_size=8)
    assert np.isfinite(list(trainer.train(3).values())).all()


@pytest.mark.slow
@pytest.mark.usefixtures("forked_checks")
def test_the_check(folder):
    namespace = runpy.run_path("checked.py")
    namespace["test_same_everywhere"]()


@pytest.fixture
def two_devices(monkeypatch):
    """Gives each `MirroredStrategy()` of a program two virtual devices."""

    class OnTwoDevices(tf.distribute.MirroredStrategy):
        def __init__(self):
            reduction = tf.distribute.ReductionToOneDevice()
            super().__init__(["CPU:0", "CPU:1"], cross_device_ops=reduction)

    monkeypatch.setattr(tf.distribute, "MirroredStrategy", OnTwoDevices)


def test_the_gan_that_moved_from_keras(folder, two_devices, capsys):
    trainer = runpy.run_path("moved_gan.py")["trainer"]
    assert trainer.strategy.num_replicas_in_sync == 2
    printed = [float(x) for x in re.findall(r"told_apart': ([\d.]+)", capsys.readouterr().out)]
    assert len(printed) == 5
    assert 0.5 < printed[-1] <= 1


def test_the_outer_loop_of_orbit_users(folder, two_devices, capsys):
    """It learns, writes summaries and checkpoints, and ends at once when it is started again."""
    ended = runpy.run_path("outer_loop.py")
    lines = capsys.readouterr().out.splitlines()
    assert [int(line.split()[0]) for line in lines] == [100, 200, 300]
    assert float(re.findall(r"accuracy': ([\d.]+)", lines[-1])[0]) > 0.9
    assert [saved.step for saved in ended["checkpoints"].saved()] == [100, 200, 300]
    assert len(list((folder / "runs" / "outer_loop" / "train").iterdir())) == 1
    again = runpy.run_path("outer_loop.py")
    assert again["trainer"].step == 300
    assert capsys.readouterr().out == ""


def test_the_program_that_moved_from_the_tutorial(folder, two_devices, capsys):
    trainer = runpy.run_path("moved_tutorial.py")["trainer"]
    lines = capsys.readouterr().out.splitlines()
    assert [int(line.split()[0]) for line in lines] == list(range(1, 11))
    assert float(re.findall(r"accuracy': ([\d.]+)", lines[-1])[-1]) > 0.9
    assert trainer.step == 10 * trainer.steps_per_epoch
    runpy.run_path("moved_tutorial.py")
    assert capsys.readouterr().out == ""


def test_windows(folder, capsys):
    write_data(folder / "data")
    runpy.run_path("windows.py")
    assert capsys.readouterr().out.startswith("56 {")


def test_mixing(folder, capsys):
    runpy.run_path("mixing.py")
    assert np.isfinite(float(capsys.readouterr().out))


def test_callbacks(folder, capsys):
    trainer = runpy.run_path("rising_weight.py")["trainer"]
    logged = trainer.history.figures()
    weights = dict(zip(logged["step"], logged["weight"], strict=True))
    assert [weights[step] for step in (10, 20, 30, 40)] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert runpy.run_path("hard_examples.py")["pool"].added == 300
    assert float(capsys.readouterr().out.split()[-2]) < 1


def test_range_test(folder, capsys):
    runpy.run_path("range_test.py")
    assert 0.001 < float(capsys.readouterr().out.split()[1].rstrip(";")) < 1


def test_array_records(folder):
    runpy.run_path("array_records.py")
    features = {"image": ("image", "raw uint8", (8, 8, 1)), "label": ("label", "int64", ())}
    assert len(ddl.data.record_files("train.array_record", features)) == 100


def test_items(folder, capsys):
    runpy.run_path("items.py")
    assert capsys.readouterr().out.startswith("1000 {'image': TensorSpec(shape=(1,)")


# Programs of the pages for those who come from another framework, each with its own test.
MOVED = {"moved_gan.py", "outer_loop.py", "moved_tutorial.py"}
# tests/documents/test_notebooks.py
OF_NOTEBOOKS = {"images.py", "text.py", "table.py", "virtual_devices.py", "questions.py"}


def test_every_block_is_run_or_checked():
    """Blocks of another language would go unnoticed. `py` marks code of other frameworks."""
    languages = {block.language for page in PAGES for block in blocks(page)}
    # Without a language: what a command prints.
    assert languages == {"", "sh", "gin", "python", "py"}
    python = [b for page in PAGES for b in blocks(page) if b.language == "python"]
    names = {name for name in files() if name.endswith(".py")}
    shown = {"denoise.py", "jitter.py", "centering.py", "notebook.py", "my_gan.py", "checked.py"}
    shown |= {"windows.py", "items.py", "info_nce.py", "annealed.py", "mixing.py"}
    shown |= {"areas.py", "watch.py", "rising_weight.py", "hard_examples.py"}
    shown |= {"range_test.py", "array_records.py"}
    shown |= {"endless_digits.py"}  # imported by a config
    shown |= {"continued.py", "item_vectors.py", "split_items.py"}
    assert names == shown | OWN_STEPS.keys() | MOVED | OF_NOTEBOOKS
    assert len(python) == len(names)
