"""A search for settings with Optuna: each trial is a run of `ddl.main` with values of its own.

    python examples/sweep_optuna.py --gin_file=configs/digits_mlp.gin --study=runs/sweep --trials=20

Runs and results are kept in --study: the same command continues the study, and
`optuna-dashboard sqlite:///runs/sweep/study.db` shows it.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import optuna


def objective(trial: optuna.Trial, options: argparse.Namespace) -> float:
    """Trains with the values that Optuna suggests; returns the accuracy of the last evaluation."""
    rate = trial.suggest_float("LEARNING_RATE", 1e-3, 1.0, log=True)
    run = Path(options.study) / f"trial-{trial.number}"
    params = [f"LEARNING_RATE = {rate}", *options.gin_param]
    command = [sys.executable, "-m", "ddl.main", f"--gin_file={options.gin_file}"]
    command += [f"--model_dir={run}", *(f"--gin_param={param}" for param in params)]
    reported = 0
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            time.sleep(1)
            for step, accuracy in evaluations(run)[reported:]:
                trial.report(accuracy, step)
                reported += 1
            if trial.should_prune():
                process.terminate()  # the run saves before it ends
                raise optuna.TrialPruned
    if process.returncode == 76:  # training diverged
        raise optuna.TrialPruned
    if process.returncode:
        raise RuntimeError(f"{run} ended with status {process.returncode}.")
    return evaluations(run)[-1][1]


def evaluations(run: Path) -> list[tuple[int, float]]:
    """Returns step and accuracy of each evaluation so far."""
    file = run / "metrics.jsonl"
    whole_lines = file.read_text().split("\n")[:-1] if file.exists() else []
    lines = map(json.loads, whole_lines)
    return [(line["step"], line["accuracy"]) for line in lines if line["split"] == "eval"]


def main() -> None:
    """Makes further trials of a study."""
    parser = argparse.ArgumentParser()
    for name in ("--gin_file", "--study"):
        parser.add_argument(name, required=True)
    parser.add_argument("--gin_param", action="append", default=[])
    parser.add_argument("--trials", type=int, default=20)
    options = parser.parse_args()
    Path(options.study).mkdir(parents=True, exist_ok=True)
    study = optuna.create_study(
        study_name="sweep",
        storage=f"sqlite:///{options.study}/study.db",
        load_if_exists=True,
        direction="maximize",
        pruner=optuna.pruners.MedianPruner(),
    )
    study.optimize(lambda trial: objective(trial, options), n_trials=options.trials)
    print(f"Best accuracy: {study.best_value:.4f}, with {study.best_params}")


if __name__ == "__main__":
    main()
