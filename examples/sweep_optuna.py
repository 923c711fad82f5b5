"""A search for settings with Optuna: each trial is a run of `ddl.main` with values of its own.

    python examples/sweep_optuna.py --gin_file=configs/digits_mlp.gin --study=runs/sweep --trials=20

The results are kept in STUDY/study.db: the same command continues the study, and
`optuna-dashboard sqlite:///runs/sweep/study.db` shows it. Several machines may share a database.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import optuna


def objective(trial: optuna.Trial, options: argparse.Namespace) -> float:
    """Trains with the values that Optuna suggests; returns the last accuracy of evaluation."""
    rate = trial.suggest_float("LEARNING_RATE", 1e-3, 1.0, log=True)
    run = Path(options.study) / f"trial-{trial.number}"
    params = [f"LEARNING_RATE = {rate}", *options.gin_param]
    command = [sys.executable, "-m", "ddl.main", f"--gin_file={options.gin_file}"]
    command += [f"--model_dir={run}", *(f"--gin_param={param}" for param in params)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        accuracies: dict[int, float] = {}
        ended = False
        while not ended:
            ended = process.poll() is not None  # the lines of the end are read, too
            for step, accuracy in evaluations(run / "metrics.jsonl").items():
                if step not in accuracies:
                    accuracies[step] = accuracy
                    trial.report(accuracy, step)
            if not ended and trial.should_prune():
                process.terminate()  # the run saves, and could be resumed
                raise optuna.TrialPruned
            time.sleep(0 if ended else 1)
    if process.returncode == 76:  # diverged
        raise optuna.TrialPruned
    if process.returncode:
        raise RuntimeError(f"Trial {trial.number} ended with status {process.returncode}.")
    return accuracies[max(accuracies)]


def evaluations(path: Path) -> dict[int, float]:
    """Returns the accuracy of each evaluation so far, by its step."""
    whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
    lines = map(json.loads, whole.splitlines())
    return {line["step"]: line["accuracy"] for line in lines if line["split"] == "eval"}


def main() -> None:
    """Makes further trials of a study."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gin_file", required=True)
    parser.add_argument("--gin_param", action="append", default=[])
    parser.add_argument("--study", required=True, help="folder of the study and its runs")
    parser.add_argument("--trials", type=int, default=20)
    options = parser.parse_args()
    Path(options.study).mkdir(parents=True, exist_ok=True)
    study = optuna.create_study(
        study_name="sweep",
        storage=f"sqlite:///{options.study}/study.db",
        load_if_exists=True,
        direction="maximize",
        sampler=optuna.samplers.TPESampler(seed=0),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=4),
    )
    study.optimize(lambda trial: objective(trial, options), n_trials=options.trials)
    print(f"Best accuracy {study.best_value:.4f} of trial {study.best_trial.number}: ", end="")
    print(study.best_params)


if __name__ == "__main__":
    main()
