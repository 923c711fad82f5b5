"""Every command and every code block of the documents works as shown."""

import ast
import importlib
import json
import re
import runpy
import shlex
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from pyarrow import csv, parquet

from ddl import config, launch
from ddl.cli.commands import parse
from ddl.cli.flags import check_flags, config_flags, main_flags
from tests.contract.commands import ddl_main
from tests.documents.pages import ALL_BLOCKS, ROOT, commands, files

GIN = [block for block in ALL_BLOCKS if block.language == "gin"]
MODULES = set(re.findall(r"^import (\w+)$", "\n".join(block.text for block in GIN), re.M))
"""Modules that configs import."""

# Words of blocks that change apart what digits.gin binds: one dry run tries them together.
TOGETHER = [
    ("@train/image_folder()", "# warmed.gin", "# with_areas.gin"),
    ("@mix()", "# groups.gin", "# kept.gin"),
    ("# endless.gin", "@RandomResizedCrop()", "# remat.gin", "# warm.gin"),
]

# What a program prints, and how it is shortened.
PROGRAMS = {
    "denoise.py": (r"eval", {"train_epochs=10": "train_epochs=1"}),
    "train_moons.py": (r"'accuracy': [\d.]+", {"train_epochs=20": "train_epochs=1"}),
    "served.py": (r"tf.Tensor\(\[\[", {}),
    "areas.py": (r"'auc_by_ranks': 0\.", {"train(200)": "train(2)"}),
    "own_layers.py": (r"'accuracy'", {"train(100)": "train(2)"}),
    "my_gan.py": (r"loss/real_or_fake", {"train(100)": "train(2)"}),
    "info_nce.py": (r"loss", {"train(100)": "train(2)"}),
    "items.py": (r"^1000 {'image': TensorSpec\(shape=\(1,\)", {}),
    "array_records.py": (r"^$", {}),
    "plateau.py": (  # at such a rate the loss does not fall
        r"the rate is now 1e-13",
        {"SGD(0.5)": "SGD(1e-12)", "train_steps=300, eval_every=20": "train_steps=8, eval_every=2"},
    ),
    "range_test.py": (r"suggested \S+; tested", {}),
    "split_items.py": (r"\(2, 1\)", {}),
    "item_vectors.py": (r"\(2, 2, 32\)", {}),
    "notebook.py": (r"'accuracy'", {"train_epochs=5": "train_steps=2"}),
    "images.py": (r"'accuracy'", {"train_epochs=20": "train_epochs=1"}),
    "text.py": (r"'accuracy'", {"train_epochs=40": "train_epochs=1"}),
    "table.py": (r"'sold_loss'", {"train_epochs=40": "train_epochs=1"}),
}
# Not for a process that has started TensorFlow; tests/checking runs the check of a function.
COMPILED = {"virtual_devices.py", "checked.py"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder that holds the configs, the files that the documents show, and data."""
    path = tmp_path_factory.mktemp("documents")
    for name in ("configs", "docs"):
        (path / name).symlink_to(ROOT / name)
    for name, text in files().items():
        (path / name).write_text(text)
    write_data(path / "data")
    return path


@pytest.fixture(autouse=True)
def within(folder, monkeypatch):
    """Tests run in the folder; a `MirroredStrategy()` has one device, for many in a process."""

    class Mirrored(tf.distribute.MirroredStrategy):
        def __init__(self, devices=("CPU:0",)):  # TensorFlow's own collectives repeat their keys
            super().__init__(devices, cross_device_ops=tf.distribute.ReductionToOneDevice())

    monkeypatch.setattr(tf.distribute, "MirroredStrategy", Mirrored)
    monkeypatch.setattr("ddl.run.train.export", lambda *_: None)  # as long as the rest of a dry run
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))


def write_data(folder: Path) -> None:
    """Writes the files that docs/data.md reads."""
    folder.mkdir()
    pixels = np.random.default_rng(0).integers(0, 16, (64, 8, 8, 1)).astype("u1")
    for number, image in enumerate(pixels):
        for part in ("train", "test"):
            file = folder / "images" / part / ("cat", "dog")[number % 2] / f"{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            tf.io.write_file(str(file), tf.io.encode_png(image))
    (folder / "text.txt").write_text("The quick brown fox jumps over the lazy dog.\n" * 20)
    rows = [f"{20 + n},{n}.5,{('red', 'blue')[n % 2]},{('yes', 'no')[n % 2]}" for n in range(64)]
    (folder / "test.csv").write_text("\n".join(["age,income,colour,bought", *rows]))
    parquet.write_table(csv.read_csv(folder / "test.csv"), folder / "train.parquet")


DDL = [one for one in commands() if one.startswith("python -m ddl.") and "--help" not in one]


@pytest.mark.parametrize("command", DDL)
def test_commands_parse_and_their_configs_load(command):
    name, *arguments = shlex.split(command.removeprefix("python -m ddl."))
    if name == "launch":
        launch.build_cluster([name, *arguments])
        arguments = arguments[arguments.index("--") + 1 :]
    values = config_flags() if name == "check" else main_flags()
    parse(values, [name, *arguments], "")
    if name != "check":
        check_flags(values)
    config.load(values.gin_file, values.gin_param or ())


def configs() -> list[str]:
    """Returns the texts of the blocks, of which those of `TOGETHER` include digits.gin once."""
    texts = [block.text for block in GIN]
    for words in TOGETHER:
        some = [text for text in texts if any(word in text for word in words)]
        assert len(some) == len(words)
        lines = "".join(some).splitlines()
        texts = [text for text in texts if text not in some] + ["\n".join(dict.fromkeys(lines))]
    return texts


@pytest.mark.parametrize("text", configs(), ids=lambda text: text.splitlines()[0])
def test_configs_run(text, folder):
    (folder / "block.gin").write_text(text)
    is_first = text.startswith("# digits.gin")
    if is_first or ("WarmStart" in text and not Path("runs/digits").exists()):
        short = ("TRAIN_STEPS = 1", "EVAL_EVERY = None", "CHECKPOINT_EVERY = None")
        params = [f"--gin_param={param}" for param in short]
        ended = ddl_main("--gin_file=digits.gin", "--model_dir=runs/digits", *params)
        assert ended.status == 0, ended.err
    if not is_first:
        ended = ddl_main("--gin_file=block.gin", "--gin_search_path=configs", "--dry_run")
        assert ended.status == 0, ended.err


def shortened(name: str) -> str:
    text = files()[name]
    for long, short in PROGRAMS[name][1].items():
        assert long in text
        text = text.replace(long, short)
    return text


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_run(name, folder, capsys):
    if name == "served.py" and not Path("runs/moons/export").exists():
        exec(shortened("train_moons.py"), {"__name__": "__main__"})
    text = shortened(name)
    names = {"__name__": "__main__"}
    if name.removesuffix(".py") in MODULES:  # its names are registered once
        *_, guarded = ast.parse(text).body
        assert isinstance(guarded, ast.If)
        text = "\n".join(map(ast.unparse, guarded.body))
        names = vars(importlib.import_module(name.removesuffix(".py")))
    exec(compile(text, name, "exec"), names)
    assert re.search(PROGRAMS[name][0], capsys.readouterr().out.strip(), re.M)


def test_every_block_is_run_or_checked():
    """Blocks of another language would go unnoticed. `py` marks code of other frameworks."""
    assert {block.language for block in ALL_BLOCKS} <= {"sh", "gin", "python", "py"}
    python = [block for block in ALL_BLOCKS if block.language == "python"]
    names = {name for name in files() if name.endswith(".py")}
    imported = {f"{module}.py" for module in MODULES}
    assert names == PROGRAMS.keys() | COMPILED | imported
    assert len(python) == len(names)
    for block in ALL_BLOCKS:
        if block.language in ("python", "py"):
            compile(block.text, block.page.name, "exec")


def test_scripts_are_at_most_a_tenth_longer_than_those_of_keras():
    scripts = [b.text for b in ALL_BLOCKS if b.page.name == "migrating.md"]
    assert len(scripts) == 6
    for of_keras, own in zip(scripts[::2], scripts[1::2], strict=True):
        lines = [len(re.findall(r"^ *[^#\s]", text, re.M)) for text in (of_keras, own)]
        assert lines[1] <= 1.1 * lines[0]


NOTEBOOKS = sorted((ROOT / "docs/notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks(path):
    """Their cells compile and hold no outputs; the one that needs no devices of its own runs."""
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    names: dict = {}
    for cell in cells:
        assert not cell["outputs"]
        text = "".join(cell["source"]).replace("(0.0, 0.05)", "(0.05,)")
        code = compile(text.replace("epochs=10", "epochs=1"), path.name, "exec")
        if path.stem == "own_step":
            exec(code, names)
    assert path.stem != "own_step" or names["trainers"][0.05].evaluate()["accuracy"] > 0.3


def test_the_figures_beside_keras():
    """README shows what the program prints for Keras; differences of ddl are mere rounding."""
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    program = runpy.run_path("docs/beside_keras.py")
    readme = (ROOT / "README.md").read_text()
    shown = re.findall(r"^\| [^|]+ \| (\de-\d+) \| (\de-\d+) \|", readme, re.M)
    _, *cases = program["CASES"].values()  # no row shows the first
    for options, (of_keras, of_ddl) in zip(cases, shown, strict=True):
        found = program["difference"](program["with_keras"], **options)
        assert float(f"{found:.0e}") == float(of_keras)
        assert float(of_ddl) < 1e-12  # tests/contract/test_parity.py shows it
