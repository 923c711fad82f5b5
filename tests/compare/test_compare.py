"""The command ddl compare: its runs, its words, and its errors."""

import json

import pytest

from ddl.compare import __main__ as command
from ddl.compare.comparison import compare, verdict
from ddl.errors import ConfigError


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Writes a finished run, and works in the folder of the runs."""
    monkeypatch.chdir(tmp_path)

    def make(path, seed, value, *, total=10, saved=True, **bindings):
        folder = tmp_path / path
        (folder / "checkpoints").mkdir(parents=True)
        texts = {"SEED": seed, "LR": 0.1, "TRAIN_STEPS": 10, "TOTAL_STEPS": total, **bindings}
        text = "".join(f"{name} = {value!r}\n" for name, value in texts.items())
        for name in ("config.gin", "operative_config.gin"):
            (folder / name).write_text(text)
        if saved:
            (folder / "checkpoints" / f"step-{total}.index").touch()
        line = {"step": total, "epoch": 1.0, "split": "eval", "loss": 1.0, "accuracy": value}
        (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
        return folder

    return make


@pytest.fixture
def run(capsys):
    def run(*arguments):
        status = 0
        try:
            command.run(["ddl compare", *arguments])
        except SystemExit as ended:
            status = ended.code
        finally:
            for name in command.FLAGS:
                command.FLAGS[name].unparse()
        output, errors = capsys.readouterr()
        assert "Traceback" not in errors, errors
        return status, output, errors

    return run


def two(make, first=(0.5, 0.6, 0.7), second=(0.61, 0.69, 0.8), seeds=(0, 0), **other):
    """Writes two settings into a folder."""
    for letter, values, seed, more in (
        ("a", first, seeds[0], {}),
        ("b", second, seeds[1], other or {"LR": 0.2}),
    ):
        for number, value in enumerate(values):
            make(f"runs/{letter}{number}", seed + number, value, **more)


def test_two_settings_of_one_folder_are_paired_by_seed(make, run):
    two(make)
    status, output, _ = run("runs", "--metric=accuracy")
    assert status == 0
    assert output.splitlines() == [
        "A: LR = 0.1 (3 seeds, runs)",
        "B: LR = 0.2 (3 seeds, runs)",
        "",
        "accuracy (eval; larger is better)",
        "seed    A     B  B − A",
        "   0  0.5  0.61  +0.11",
        "   1  0.6  0.69  +0.09",
        "   2  0.7   0.8   +0.1",
        "",
        "B − A = +0.1; 95% interval +0.07516 to +0.1248 (paired t, 2 degrees of freedom); "
        "sign-flip test p = 0.25; paired by 3 seeds.",
        "B is better than A: the 95% interval excludes 0. At most about 5% of "
        "comparisons of equal settings show this. It assumes normal differences: with fewer than 6 "
        "seeds, the sign-flip test cannot confirm it.",
    ]


def test_the_settings_are_chosen_by_bindings(make, run):
    two(make)
    for seed in (0, 1, 2):
        make(f"runs/c{seed}", seed, 0.9, LR=0.3)
    status, output, _ = run("runs", "--metric=accuracy", "--a=LR = 2e-1", "--b=LR = 0.1")
    assert status == 0
    assert output.startswith("A: LR = 0.2 (3 seeds, runs)\nB: LR = 0.1 (3 seeds, runs)\n")
    assert "B is worse than A" in output
    status, _, errors = run("runs")
    assert status == 1
    assert "has 3 settings, which differ in LR. Choose two by --a and --b" in errors


def test_folders_patterns_and_sweeps(make, run, tmp_path):
    two(make)
    patterns = run("runs/a*", "runs/b*", "--metric=accuracy")
    assert patterns[0] == 0, patterns[2]
    for letter in "ab":
        (tmp_path / letter / "runs").mkdir(parents=True)
        (tmp_path / letter / "sweep.json").touch()
        for number in range(3):
            source = tmp_path / "runs" / f"{letter}{number}"
            source.rename(tmp_path / letter / "runs" / source.name)
    sweeps = run("a", "b", "--metric=accuracy")
    assert sweeps[1].splitlines()[2:] == patterns[1].splitlines()[2:]


def test_disjoint_seeds_are_compared_unpaired(make, run):
    two(make, seeds=(0, 10))
    status, output, _ = run("runs", "--metric=accuracy")
    assert status == 0
    assert "unpaired: no seed is common" in output
    assert "Welch t" in output
    assert "sign-flip" not in output
    assert "Not sure that they differ: the 95% interval contains 0." in output


def test_a_setting_is_compared_with_itself(make, run):
    for seed in range(4):
        make(f"{'ab'[seed % 2]}/{seed}", seed, 0.5 + 0.01 * seed)
    status, output, _ = run("a", "b", "--metric=accuracy")
    assert status == 0
    assert output.startswith("A: the same config (2 seeds, a)\nB: the same config (2 seeds, b)\n")


def test_seeds_of_one_setting_alone_are_left_out(make, run):
    two(make)
    make("runs/a9", 9, 0.5)
    output = run("runs", "--metric=accuracy")[1]
    assert "Seeds of one setting alone are left out: 9." in output
    assert "paired by 3 seeds" in output


def test_lengths_that_follow_from_the_compared_bindings_are_not_beyond_them(make, run):
    two(make, BATCH=8, total=20)
    status, output, errors = run("runs", "--a=TOTAL_STEPS = 10", "--b=BATCH = 8")
    assert status == 0, errors
    assert output.startswith("A: BATCH = not bound (3 ")


def errors_of(case, make):
    """Writes the runs of a case; returns the arguments, and a part of the message."""
    if case == "no folder":
        return ["nowhere"], "nowhere must be the folder of a sweep, a folder of runs or a pattern"
    if case == "no run":
        (make("runs/a", 0, 0.5).parent / "empty").mkdir()
        return ["runs/empty"], "but there is no run in it"
    if case == "one seed":
        two(make, (0.5,), (0.6, 0.7))
        return ["runs"], "A must have runs of at least two seeds, got 1"
    if case == "one common seed":
        two(make, seeds=(0, 2))
        return ["runs"], "at least two seeds in common, or none, got SEED = 2 alone"
    if case == "same seed":
        two(make)
        make("runs/a9", 0, 0.5)
        return ["runs"], "runs/a0 and runs/a9 both have SEED = 0"
    if case == "same runs":
        two(make)
        return ["runs/a*", "runs/a*"], "A and B must be different runs"
    if case == "one setting":
        two(make, LR=0.1, seeds=(0, 5))
        return ["runs"], "All 6 runs have the same setting"
    if case == "beyond the seed":
        two(make)
        return ["runs", "runs/b*"], "The runs of A must differ in SEED alone, but they differ"
    if case == "beyond what is compared":
        two(make, LR=0.2, CLIP=1.0)
        chosen = ["runs", "--a=LR = 0.1", "--b=LR = 0.2"]
        return (
            chosen,
            "A and B must differ in LR alone, but they differ in more:\n  CLIP: not bound",
        )
    if case == "unfinished":
        two(make)
        make("runs/a9", 9, 0.5, saved=False)
        return ["runs"], "All runs must be finished, but 1 of A are not: runs/a9"
    if case == "metric":
        two(make)
        return ["runs", "--metric=top_5_accuracy"], "(loss, accuracy), got 'top_5_accuracy', which"
    if case == "not finite":
        two(make, (0.5, None))
        return ["runs", "--metric=accuracy"], "accuracy must be finite at the end of each run"
    if case == "unknown binding":
        two(make)
        return ["runs", "--a=LRR = 1", "--b=LR = 1"], "no run binds LRR. Did you mean LR?"
    if case == "unknown value":
        two(make)
        return ["runs", "--a=LR = 1", "--b=LR = 0.2"], "no run has this value. The runs have 0.1, 0"
    if case == "by seed":
        two(make)
        return ["runs", "--a=SEED = 1", "--b=LR = 0.2"], "--a must not choose by SEED"
    if case == "no config":
        two(make)
        (make("runs/z", 3, 0.5) / "config.gin").unlink()
        return ["runs"], "runs/z must have a config.gin"
    if case == "no seed":
        two(make)
        make("runs/z", None, 0.5)
        return ["runs"], "must bind SEED to a whole number, got None"
    if case == "sanity mode":
        (make("runs", 3, 0.5) / "sanity_run.txt").write_text("fast_run\n")
        return ["runs"], "runs was written by --fast_run, which is no real run."
    if case == "one flag":
        return ["runs", "--a=LR = 1"], "Pass both, or none."
    if case == "direction":
        return ["runs", "--metric=mine"], "--best is required for the metric 'mine'"
    assert case == "three folders"
    return ["a", "b", "c"], "takes one folder with both settings, or two folders, got 3"


CASES = (
    *("no folder", "no run", "one seed", "one common seed", "same seed", "same runs"),
    *("one setting", "beyond the seed", "beyond what is compared", "unfinished", "metric"),
    *("not finite", "unknown binding", "unknown value", "by seed", "no config", "no seed"),
    *("one flag", "direction", "three folders", "sanity mode"),
)


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_be_compared_is_refused(case, make, run):
    arguments, message = errors_of(case, make)
    status, output, errors = run(*arguments)
    assert status == 1
    assert output == ""
    assert message in errors


def test_runs_of_sanity_modes_are_left_out(make, run):
    two(make)
    (make("runs/a0-overfit_batch", 0, 0.9) / "sanity_run.txt").write_text("overfit_batch\n")
    status, output, errors = run("runs", "--metric=accuracy")
    assert status == 0, errors
    assert "0.9" not in output


def test_equal_values_are_called_equal():
    found = compare({0: 0.5, 1: 0.6}, {0: 0.5, 1: 0.6})
    assert found.verdict == "equal"
    assert "equal for every seed" in verdict(found, "max")


def test_equal_differences_are_not_called_sure():
    found = compare({0: 0.5, 1: 0.6}, {0: 0.6, 1: 0.7})
    assert found.verdict == "unclear"
    assert "all differences are the same" in verdict(found, "max")


def test_with_enough_seeds_the_sign_flip_test_must_agree():
    differences = [1.0, 1.1, 0.9, 1.0, 1.1, -0.05, 1.0]
    found = compare(dict.fromkeys(range(7), 0.0), dict(enumerate(differences)))
    assert found.interval.excludes_zero
    assert found.p == pytest.approx(4 / 128)
    assert found.verdict == "different"
    assert "sign-flip test cannot" not in verdict(found, "max")
    skewed = dict(enumerate([-0.2, 1.0, 1.0, 1.0, 1.0, 1.0]))
    found = compare(dict.fromkeys(range(6), 0.0), skewed)
    assert found.interval.excludes_zero
    assert found.p > 0.05
    assert found.verdict == "unclear"
    assert "the sign-flip test, which does not, has p = 0.062" in verdict(found, "max")


def test_the_direction_decides_which_is_better():
    found = compare({0: 1.0, 1: 1.1, 2: 0.9}, {0: 2.0, 1: 2.2, 2: 1.9})
    assert verdict(found, "max").startswith("B is better than A")
    assert verdict(found, "min").startswith("B is worse than A")


def test_one_seed_is_too_few():
    with pytest.raises(ConfigError, match="B must have at least two seeds, got 1"):
        compare({0: 1.0, 1: 2.0}, {0: 1.0})
