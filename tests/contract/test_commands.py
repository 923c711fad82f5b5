"""The commands: flags, help, strategies and the dry run."""

import re
import subprocess
import sys

import pytest

from tests.contract.commands import FOUR_DEVICES, SMALL, assert_error, ddl_main, done, lines, small

# The flags of ddl.main.
FLAGS = (
    *("gin_file", "gin_param", "gin_bindings", "gin_search_path", "gin_allow_unused"),
    *("model_dir", "mode", "checkpoint", "predictions", "follow_timeout", "dry_run"),
    *("strategy", "cluster", "num_virtual_devices", "gpus", "deterministic_ops", "tf32"),
    *("jit_compile", "shard_optimizer_state", "steps_per_loop", "profile", "worker_timeout"),
)
# An import of TensorFlow or Keras fails in such a process.
GUARD = "import runpy, sys; sys.modules['tensorflow'] = sys.modules['keras'] = None; "

WITHOUT_TENSORFLOW = {
    "ddl.main --help": (0, [*FLAGS, "parameter_server", "75", "76"]),
    "ddl.launch --help": (0, ["num_workers", "num_ps", "max_restarts"]),
    "ddl.check --help": (0, ["gin_file"]),
    "ddl --help": (0, ["train", "launch", "check"]),
    "ddl train --help": (0, ["model_dir"]),
    "ddl.main --gin_fil=a.gin": (1, ["gin_fil", "gin_file", "with --help"]),
    "ddl.main": (1, ["--gin_file"]),
    "ddl.launch --num_wokers=2 -- --model_dir=run": (1, ["num_wokers", "num_workers"]),
    "ddl chek": (1, ["chek", "train", "launch", "check"]),
    f"ddl.main --gin_file={SMALL} --model_dir=run --strategy=miror": (1, ["miror", "mirrored"]),
    f"ddl.main --gin_file={SMALL} --dry_run --gpus=-1": (1, ["--gpus", "'-1'"]),
    f"ddl.main --gin_file={SMALL} --dry_run --gin.SEED=%LOG_EVRY": (1, ["%LOG_EVRY", "LOG_EVERY"]),
}


def test_help_and_wrong_flags_need_no_tensorflow():
    running = {}
    for command in WITHOUT_TENSORFLOW:
        module, *arguments = command.split()
        code = f"{GUARD} sys.argv = {[module, *arguments]!r}; "
        code += f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        running[command] = subprocess.Popen([sys.executable, "-c", code], **pipes)
    for command, (status, words) in WITHOUT_TENSORFLOW.items():
        out, err = running[command].communicate(timeout=600)
        assert running[command].returncode == status, (command, err)
        assert [word for word in words if word not in (err if status else out)] == [], command
        assert "Traceback" not in err


RUN = ("--model_dir=run",)
WRONG_FLAGS = [
    ([], "--model_dir"),
    ([*RUN, "extra"], "'extra'"),
    ([*RUN, "--model_dir=other"], "model_dir"),
    ([*RUN, "--dry_run", "--nodry_run"], "dry_run", "already defined"),
    ([*RUN, "--gin_allow_unused=3", "--gin_allow_unused=4"], "already defined as ['3']"),
    (["--model_dir="], "--model_dir", "empty"),
    ([*RUN, "--gin_file=absent.gin"], "absent.gin"),
    ([*RUN, "--gin.LOG_EVRY=3"], "LOG_EVRY", "LOG_EVERY"),
    ([*RUN, "--mode=evaluate"], "mode", "train_and_eval"),
    ([*RUN, "--num_virtual_devices=0"], "num_virtual_devices", "0"),
    ([*RUN, "--num_virtual_devices=2"], "2 virtual devices", "4"),  # this process has 4
    ([*RUN, "--gpus=99"], "GPU 99"),
    ([*RUN, "--steps_per_loop=0"], "steps_per_loop", "0"),
    ([*RUN, "--jit_compile=maybe"], "jit_compile", "auto"),
    ([*RUN, "--mode=eval", "--checkpoint=last"], "latest", "best", "'last'"),
    ([*RUN, "--checkpoint=100"], "--checkpoint", "train_and_eval"),
    ([*RUN, "--follow_timeout=5"], "--follow_timeout", "train_and_eval"),
    ([*RUN, "--mode=eval", "--checkpoint=6", "--follow_timeout=1"], "--checkpoint", "--follow"),
    ([*RUN, "--mode=predict"], "--predictions"),
    ([*RUN, "--mode=predict", "--predictions=rows.csv"], "rows.csv", ".jsonl"),
    ([*RUN, "--predictions=rows.npz"], "--predictions", "train_and_eval"),
    ([*RUN, "--profile=11:10"], "--profile", "11:10"),
    ([*RUN, "--profile=1:2", "--mode=eval"], "--profile", "eval"),
    (["--dry_run", "--profile=1:2"], "--profile", "--dry_run"),
    ([*RUN, "--gin_param=GLOBAL_BATCH_SIZE = 62", *FOUR_DEVICES], "multiple of 4", "62"),
    ([*RUN, "--strategy=tpu"], "TPU"),
    ([*RUN, "--strategy=parameter_server"], "parameter_server", "TF_CONFIG"),
    ([*RUN, "--strategy=multi_worker_mirrored"], "multi_worker_mirrored", "TF_CONFIG"),
    ([*RUN, "--cluster=slurm"], "--cluster=slurm", "SLURM_"),
    ([*RUN, "--shard_optimizer_state", "--gin_param=Trainer.shard_optimizer_state = True"], "flag"),
]


@pytest.mark.parametrize("row", WRONG_FLAGS, ids=lambda row: " ".join(row[0]))
def test_a_wrong_flag_is_status_1_and_a_few_lines(row, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given, *words = row
    assert_error(ddl_main(f"--gin_file={SMALL}", *given), *words)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "config", ["", "nonsense", '{"cluster": {"worker": ["a:99999999"]}}', '{"cluster": []}']
)
def test_a_wrong_tf_config_is_named(config, tmp_path, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", config or '{"cluster": {"worker": ["a:1", "b:1"]}}')
    assert_error(small(tmp_path / "run"), "TF_CONFIG")


@pytest.mark.parametrize(
    ("strategy", "replicas"), [("auto", 1), ("one_device", 1), ("central_storage", 4)]
)
def test_strategies_and_their_replicas(strategy, replicas):
    ended = done(None, flags=(f"--strategy={strategy}", "--num_virtual_devices=4"))
    assert re.search(rf"\breplicas\W+{replicas}\b", ended.out)


def test_a_dry_run_shows_the_plan_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    warmed = ("SCALING_RULE = 'linear'", "BASE_BATCH_SIZE = 32", "WARMUP_STEPS = 4")
    ended = done(tmp_path / "run", *warmed, flags=("--dry_run=config", *FOUR_DEVICES))
    assert list(tmp_path.iterdir()) == []
    # Parameters, examples, replicas and their batch, updates, the peak of the rate, the loss.
    shown = [r"1,?210", r"1,?437", r"replicas\W+4", r"\b16\b", r"steps\W+12", r"\b0\.1\b"]
    shown += [r"loss\W+2\.", r"LEARNING_RATE = 0\.05", r"SGD\.momentum = 0\.9"]
    for pattern in [*shown, r"SGD\.nesterov = False"]:
        assert re.search(pattern, ended.out), pattern


def test_the_forms_of_a_binding_and_later_files_override(tmp_path):
    (tmp_path / "own.gin").write_text("TRAIN_STEPS = 9\nLOG_EVERY = 4\nEVAL_EVERY = None\n")
    files = (f"--gin_search_path={tmp_path}", "--gin_file=own.gin", "--mode=train")
    others = ("--gin.TRAIN_STEPS=2", "--gin_bindings=LOG_EVERY = 2", "--steps_per_loop=1")
    done(tmp_path / "run", "EVAL_EVERY = 1", flags=(*files, *others))
    assert [(line["split"], line["step"]) for line in lines(tmp_path / "run")] == [("train", 2)]
