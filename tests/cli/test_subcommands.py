"""The command ddl: its subcommands, answered without TensorFlow."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from ddl import __main__ as command
from ddl.cli import subcommands
from ddl.cli.flags import flags_of
from ddl.cli.subcommands import SUBCOMMANDS

ROOT = Path(__file__).parents[2]

# Each kind of question in one process: all are answered before TensorFlow is imported.
PROGRAM = """
import sys
from ddl.__main__ import run
run(["ddl", "--help"])
assert "absl" not in sys.modules
from ddl.cli.subcommands import SUBCOMMANDS
for name in SUBCOMMANDS:
    for arguments in ([name, "--help"], ["help", name], [name, "--nonsense"]):
        try:
            run(["ddl", *arguments])
        except SystemExit as ended:
            assert ended.code == ("--nonsense" in arguments), name
        assert not {"tensorflow", "keras", "numpy", "gin"} & set(sys.modules), name
for arguments in (["list", "flags"], ["list", "strategy"], ["completion", "bash"]):
    run(["ddl", *arguments])
    assert not {"tensorflow", "keras"} & set(sys.modules), arguments
"""


def test_questions_are_answered_without_tensorflow():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "\033" not in done.stdout
    overview = done.stdout.partition("--model_dir=…`.")[0].splitlines()
    for name, one in SUBCOMMANDS.items():
        assert f"  {name:10}  {one.purpose}" in overview
        assert f"ddl {name} --help" in done.stderr or f"ddl-{name} --help" in done.stderr
    assert max(map(len, overview)) <= 80


def test_each_subcommand_is_a_module_of_its_name():
    for name in SUBCOMMANDS:
        folder = ROOT / "ddl" / name
        assert (folder / "__main__.py").is_file() or folder.with_suffix(".py").is_file(), name
        module = subcommands.load(name)
        assert callable(module.run)
        assert module.__doc__
        flags_of(module.FLAGS)


def test_the_installed_commands():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"ddl": "ddl.__main__:run", "ddl-launch": "ddl.launch:run"}
    done = subprocess.run(
        [sys.executable, "-m", "ddl.train", "--nonsense"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "Run ddl train --help" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "started"),
    [
        (["check", "--gin_file=a.gin"], ("check", ["--gin_file=a.gin"])),
        (["--gin_file=a.gin", "--dry_run"], ("train", ["--gin_file=a.gin", "--dry_run"])),
        (["--gin_file=a.gin", "--help"], ("train", ["--gin_file=a.gin", "--help"])),
        (["help", "show"], ("show", ["--help"])),
    ],
)
def test_what_starts(arguments, started, monkeypatch):
    seen = []
    monkeypatch.setattr(command, "start", lambda *given: seen.append(given))
    command.run(["ddl", *arguments])
    assert seen == [started]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lunch"], "There is no command 'lunch'. Did you mean launch? The commands are train, "),
        (["lr-finder"], "Did you mean lr_finder?"),
        (["help", "shwo"], "There is no command 'shwo'. Did you mean show?"),
        (["nothing"], "There is no command 'nothing'. The commands are train, "),
        ([], "A command is required.\nUsage: ddl COMMAND"),
    ],
)
def test_a_misspelt_command_names_the_nearest(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        command.run(["ddl", *arguments])
    assert ended.value.code == 1
    assert message in capsys.readouterr().err


def test_the_version(capsys):
    command.run(["ddl", "--version"])
    assert capsys.readouterr().out == "ddl 0.1.0\n"
