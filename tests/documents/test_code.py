"""Every command and every code block of the documents works as shown."""

import re
import shlex
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from pyarrow import csv, parquet

import ddl
from ddl import config, launch
from ddl.checkpoints.export import export_model
from ddl.cli.commands import parse
from ddl.cli.flags import check_flags, config_flags, main_flags
from ddl.distribution.communication import Communication
from ddl.distribution.workers import Workers
from ddl.optimizers.loss_weight import loss_weights
from ddl.run import train
from tests.conftest import make_strategy
from tests.documents.pages import PAGES, ROOT, Block, blocks, commands, files
from tests.documents.starts import start


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_data(folder)
    return folder


@pytest.fixture
def folder(tmp_path, monkeypatch, data) -> Path:
    """A folder that holds the configs, the files that the documents show, and nothing of a run."""
    for name in ("configs", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "data").symlink_to(data)
    for name, text in files().items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


# ------------------------------------------------------------ commands

DDL = re.compile(r"python -m ddl\.(?P<module>main|launch|check) |ddl (?P<name>train|launch|check) ")


@pytest.mark.parametrize("command", filter(DDL.match, commands()))
def test_commands_parse_and_their_configs_load(command, folder):
    if "--help" in command:
        return  # tests/documents/test_names.py reads it
    which = DDL.match(command)
    name = which["module"] or which["name"]
    arguments = [name, *shlex.split(command[which.end() :])]
    if name == "launch":
        launch.build_cluster(arguments)
        arguments = arguments[arguments.index("--") :]
    values = config_flags() if name == "check" else main_flags()
    parse(values, arguments, "")
    if name != "check":
        check_flags(values)
    config.load(values.gin_file, values.gin_param or ())


@pytest.mark.processes
def test_the_example_of_the_readme(folder):
    (command,) = (each for each in commands() if "denoise.gin" in each)
    output = start(shlex.split(command)[1:], folder)
    losses = [float(loss) for loss in re.findall(r"eval · loss ([\d.e-]+)", output)]
    assert losses[-1] < losses[0]


@pytest.mark.processes
def test_the_figures_beside_keras(folder):
    """README shows what the program prints for Keras; differences of ddl are mere rounding."""
    output = start(["docs/beside_keras.py"], folder)
    rows = re.findall(r"^(.*\S) +(\S+) +(\S+)$", output, re.M)[1:]
    assert len(rows) == 4, output
    readme = (ROOT / "README.md").read_text()
    shown = re.findall(r"^\| [^|]+ \| (\de-\d+) \| (\de-\d+) \|", readme, re.M)
    of_keras = [float(by_keras) for _, by_keras, _ in rows[1:]]
    assert of_keras == [float(by_keras) for by_keras, _ in shown], output
    assert all(float(by_ddl) < 1e-12 for *_, by_ddl in [*rows, *shown]), output


# ------------------------------------------------------------ configs

GIN = [block for page in PAGES for block in blocks(page) if block.language == "gin"]


@pytest.mark.parametrize("block", GIN, ids=lambda block: block.page.name)
def test_configs(block: Block, folder):
    """A config makes a trainer. One without an `include` adds to digits.gin and replaces there."""
    text, unused = block.text, ()
    if "include" not in text:
        text, unused = f"include 'digits.gin'\n{text}", ("SGD.*", "LEARNING_RATE")
    if "train_data" in text:  # in place of the digits
        unused += ("images.*", "train/images.*", "test/images.*")
    if re.search(r"model = @(?!cnn|teacher)", text):
        unused += ("cnn.*",)
    if "Trainer.task" in text:
        unused += ("Classification.*",)
    (folder / "block.gin").write_text(text)
    config.load([str(folder / "block.gin")])
    strategy = make_strategy("one_device", 1)
    placement = train.Placement(strategy, Communication())
    train.build(placement, Workers(strategy))
    config.check_all_used(unused)


def write_data(folder: Path) -> None:
    """Writes the files that docs/data.md reads."""
    random = np.random.default_rng(0)
    images, labels = random.integers(0, 16, (64, 8, 8, 1)).astype("u1"), np.arange(64) % 2
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


# ------------------------------------------------------------ programs

# What the programs print, and how they are shortened.
PROGRAMS = {
    "areas.py": (r"'auc_by_ranks': 0\.", {"train(200)": "train(2)"}),
    "continued.py": (r"(?s).{60}", {"train(200)": "train(2)"}),
    "range_test.py": (r"^\S+ [\d.]+;", {}),
    "array_records.py": ("^$", {}),
    "info_nce.py": ("loss", {}),
    "items.py": (r"^1000 {'image': TensorSpec\(shape=\(1,\)", {}),
    "mixing.py": (r"^[\d.]+$", {}),
    "moved_tutorial.py": (r"^1 .*'accuracy': [\d.]+", {"EPOCHS = 10": "EPOCHS = 1"}),
    "my_gan.py": ("loss/real_or_fake", {"train(100)": "train(2)"}),
    "notebook.py": ("'accuracy'", {"train_epochs=5": "train_steps=2"}),
    "outer_loop.py": (
        r"^4 .*'accuracy'",
        {"LAST = 300": "LAST = 4", "(50,": "(2,", "(100,": "(4,"},
    ),
    "questions.py": (
        r"(?m)^[\d.]+ [\d.]+$",
        {"train_epochs=3": "train_steps=2", "train_epochs=4": "train_steps=4"},
    ),
    "rising_weight.py": (r"(?s)\b0\.1\b.*\b0\.2\b.*\b0\.3.*\b0\.4", {}),
    "table.py": ("'mae'", {"train_epochs=40": "train_epochs=1"}),
    "windows.py": (r"^56 {", {}),
}


@pytest.fixture
def one_device(monkeypatch):
    """`MirroredStrategy()` on one device; its own all-reduce cannot be used twice in a process."""

    class OnOneDevice(tf.distribute.MirroredStrategy):
        def __init__(self, **_):
            reduction = tf.distribute.ReductionToOneDevice()
            super().__init__(["CPU:0"], cross_device_ops=reduction)

    monkeypatch.setattr(tf.distribute, "MirroredStrategy", OnOneDevice)


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name, folder, one_device, capsys):
    printed, shorter = PROGRAMS[name]
    text = files()[name]
    for long, short in shorter.items():
        assert long in text
        text = text.replace(long, short)
    exec(compile(text, name, "exec"), {"__name__": "__main__"})
    assert re.search(printed, capsys.readouterr().out.strip())


def names_of(file: str) -> dict:
    """Returns the names that a program defines."""
    names: dict = {}
    exec(files()[file], names)
    return names


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
    layer = names_of("jitter.py")["Jitter"]
    (_, one), (trainer, two) = (trained_with(layer, replicas) for replicas in (1, 2))
    assert one == pytest.approx(two, rel=1e-6)
    exported, _ = export_model(trainer.model, tmp_path)
    keras.models.load_model(exported)


def test_the_layer_that_sums_over_the_replicas():
    """Two replicas keep the mean that one device keeps."""
    layer = names_of("centering.py")["Centering"]
    results = [trained_with(layer, replicas) for replicas in (1, 2)]
    assert results[0][1] == pytest.approx(results[1][1], rel=1e-6)
    means = [trainer.model.layers[0].mean.numpy() for trainer, _ in results]
    mean = (np.arange(24).reshape(8, 3) / 24).mean(0) * (1 - 0.9**3)
    np.testing.assert_allclose(means, [mean, mean], rtol=1e-5)


def test_the_layer_that_looks_up_rows():
    layer = names_of("item_vectors.py")["ItemVectors"]()
    found = layer(np.array([[3, 7], [999_999, 3]]))
    np.testing.assert_array_equal(found, layer.table.numpy()[[[3, 7], [999_999, 3]]])


def test_the_split_table():
    names: dict = {}
    exec(files()["split_items.py"].replace("10_000_000", "1_000_000"), names)
    assert [len(v.shape) for v in names["model"].weights] == [2] * 65 + [1]
    assert names["model"](np.array([1, 999_999])).shape == (2, 1)


def test_the_loss_whose_weight_anneals():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    task, data = names_of("annealed.py")["Annealed"](model), {"image": np.ones([8, 3], "f4")}
    trainer = ddl.Trainer(task, keras.optimizers.SGD(0.1), data, global_batch_size=8)
    assert np.isfinite(trainer.train(2)["loss"])
    assert loss_weights(trainer.task, 2) == {"loss_weight/sparsity": pytest.approx(1e-3)}


OWN_STEPS = ("sharp.py", "surgery.py", "private.py", "two_sources.py")


@pytest.mark.parametrize("name", OWN_STEPS)
def test_the_steps(name):
    """Steps that docs/own-step.md shows without their losses."""
    defined = names_of(name).values()
    layers = [keras.layers.Dense(4), keras.layers.Dense(2)]
    classification = ddl.Classification(keras.Sequential([keras.Input((3,)), *layers]))
    (shown,) = [cls for cls in defined if isinstance(cls, type) and hasattr(cls, "step")]

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
    trainer = ddl.Trainer(task, keras.optimizers.SGD(0.1), data, global_batch_size=8)
    assert np.isfinite(list(trainer.train(3).values())).all()


# Imported by configs, tested above, or only compiled: much like others, or not for this process.
SHOWN = {
    *("denoise.py", "watch.py", "endless_digits.py", "jitter.py", "centering.py"),
    *("item_vectors.py", "split_items.py", "annealed.py", "adapted.py", "two_heads.py"),
    *("checked.py", "virtual_devices.py", "moved_gan.py", "images.py", "text.py"),
}


def test_every_block_is_run_or_checked():
    """Blocks of another language would go unnoticed. `py` marks code of other frameworks."""
    languages = {block.language for page in PAGES for block in blocks(page)}
    # Without a language: what a command prints.
    assert languages <= {"", "sh", "gin", "python", "py"}
    python = [b for page in PAGES for b in blocks(page) if b.language == "python"]
    names = {name for name in files() if name.endswith(".py")}
    assert names == SHOWN | PROGRAMS.keys() | {*OWN_STEPS}
    assert len(python) == len(names)
    for name in names:
        compile(files()[name], name, "exec")
