"""The command ddl: its subcommands, answered without TensorFlow."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from ddl import __main__ as command
from ddl.cli.subcommands import SUBCOMMANDS

ROOT = Path(__file__).parents[2]

# Each kind of question in one process: all are answered before TensorFlow is imported.
PROGRAM = """
import sys
from ddl.__main__ import run
run(["ddl", "--help"])
assert "absl" not in sys.modules
for name in ("train", "launch", "check"):
    for arguments in ([name, "--help"], ["help", name], [name, "--nonsense"]):
        try:
            run(["ddl", *arguments])
        except SystemExit as ended:
            assert ended.code == ("--nonsense" in arguments), name
        assert not {"tensorflow", "keras", "numpy", "gin"} & set(sys.modules), name
"""


def test_questions_are_answered_without_tensorflow():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "\033" not in done.stdout
    overview = done.stdout.partition("--model_dir=…`.")[0].splitlines()
    for name, one in SUBCOMMANDS.items():
        assert f"  {name:6}  {one.purpose}" in overview
        assert f"ddl {name} --help" in done.stderr or f"ddl-{name} --help" in done.stderr
    assert max(map(len, overview)) <= 80


def test_train_launch_and_check_are_all_subcommands():
    assert list(SUBCOMMANDS) == ["train", "launch", "check"]


def test_the_installed_commands():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"ddl": "ddl.__main__:run", "ddl-launch": "ddl.launch:run"}


@pytest.mark.parametrize(
    ("arguments", "started"),
    [
        (["check", "--gin_file=a.gin"], ("check", ["--gin_file=a.gin"])),
        (["--gin_file=a.gin", "--dry_run"], ("train", ["--gin_file=a.gin", "--dry_run"])),
        (["--gin_file=a.gin", "--help"], ("train", ["--gin_file=a.gin", "--help"])),
        (["train", "--dry_run"], ("train", ["--dry_run"])),
        (["help", "launch"], ("launch", ["--help"])),
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
        (["help", "chekc"], "There is no command 'chekc'. Did you mean check?"),
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
