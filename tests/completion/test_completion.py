"""The completions: of bash in a real bash; zsh and fish read their scripts where they are there."""

import shutil
import subprocess

import pytest

from ddl.cli.arguments import _PATHS
from ddl.cli.subcommands import SUBCOMMANDS
from ddl.completion import __main__ as completion
from ddl.completion import bash, fish, zsh
from ddl.completion.words import POSITIONAL, words_of_all_commands
from ddl.config.explained.kinds import KINDS
from ddl.list.finding import OTHERS

# What is typed, split as bash splits it, and what it completes to.
TYPED = {
    "ddl|": " ".join(SUBCOMMANDS),
    "ddl|tr": "train",
    "ddl|train|--mo": "--model_dir= --mode=",
    "ddl|--strat": "--strategy=",
    "ddl|train|--mode|=|": "train_and_eval train eval export predict",
    "ddl|train|--mode|=|e": "eval export",
    "ddl|train|--mode|e": "eval export",
    "ddl|train|--mode=e": "--mode=eval --mode=export",
    "ddl|train|--noav": "--noaveraged_weights",
    "ddl|train|--dry_run|--mode|=|tr": "train_and_eval train",
    "ddl|train|--gin_file|=|configs/a": "configs/a.gin",
    "ddl|--model_dir|=|con": "configs",
    "ddl|show|configs/": "configs/a.gin configs/runs",
    "ddl|report|configs/": "configs/runs",
    "ddl|compare|configs/": "configs/runs",
    "ddl|sweep|--sweep_dir|=|configs/": "configs/runs",
    "ddl|sweep|--stop_early|=|s": "successive_halving",
    "ddl|report|--output|=|configs/a": "configs/a.gin configs/a.txt",
    "ddl|report|--pictures|=|configs/": "configs/runs",
    "ddl|convert|--output|=|configs/": "configs/runs",
    "ddl|--predictions|=|configs/a.t": "configs/a.txt",
    "ddl|generate|--prompt_file|=|configs/a.t": "configs/a.txt",
    "ddl|list|opt": "optimizers",
    "ddl|completion|": "bash zsh fish",
    "ddl|launch|--num_workers|=|2|--|--dr": "--dry_run",
    "ddl|check|--model": "",
    "ddl-launch|--pi": "--pin=",
    "ddl-launch|--pin|=|c": "cores",
    "/usr/bin/ddl-launch|--num_workers|=|2|--|--mode|=|e": "eval export",
}

# Prints a line for each line of words on standard input.
DRIVER = """
while IFS= read -r line; do
    IFS='|' read -r -a COMP_WORDS <<< "$line"
    [[ $line == *'|' ]] && COMP_WORDS+=("")
    COMP_CWORD=$(( ${#COMP_WORDS[@]} - 1 ))
    _ddl 2>/dev/null
    echo "${COMPREPLY[*]}"
done
"""


@pytest.fixture(scope="module")
def words():
    return words_of_all_commands()


def test_bash_completes(words, tmp_path):
    (tmp_path / "configs" / "runs").mkdir(parents=True)
    (tmp_path / "configs" / "a.gin").write_text("")
    (tmp_path / "configs" / "a.txt").write_text("")
    done = subprocess.run(
        ["bash", "-c", bash.script(words) + DRIVER],
        input="\n".join(TYPED) + "\n",
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    assert dict(zip(TYPED, done.stdout.splitlines(), strict=True)) == TYPED


def test_each_script_has_every_flag(words):
    for name, script in (("bash", bash.script), ("zsh", zsh.script), ("fish", fish.script)):
        text = script(words)
        for command in words:
            assert command.name in text
            for flag in command.flags:
                typed = flag.name.removeprefix("--") if name == "fish" else flag.name
                assert typed in text, (name, flag)
        if name == "fish":  # after --, the flags of ddl train
            assert "contains -- -- (commandline -opc)' -a '--mode=train_and_eval --mode=" in text
        assert ">: " not in text  # absl's list of choices before the help of a flag
        if shutil.which(name):
            check = "--no-execute" if name == "fish" else "-n"
            subprocess.run([name, check], input=text, text=True, check=True)


def test_each_flag_that_takes_a_path_completes_files(words):
    paths = {f"--{name}" for name in (*_PATHS, "gin_search_path")}
    for command in words:
        for flag in command.flags:
            assert (flag.files != "none") == (flag.name in paths), (command.name, flag.name)
    assert "-l output -d 'The HTML file to write' -r -F\n" in fish.script(words)
    assert "--output=[The HTML file to write]:value:_files'" in zsh.script(words)
    assert "*:run:_files -/'" in zsh.script(words)


def test_the_kinds_are_those_of_ddl_list():
    assert POSITIONAL["list"] == (*KINDS, *OTHERS)
    assert POSITIONAL["completion"] == completion.SHELLS


@pytest.mark.parametrize(
    ("arguments", "message"),
    [([], "takes one shell: bash, zsh or fish"), (["fihs"], "got 'fihs'. Did you mean fish?")],
)
def test_a_wrong_shell(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        completion.run(["ddl completion", *arguments])
    assert ended.value.code == 1
    assert message in capsys.readouterr().err
