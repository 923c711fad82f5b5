import numpy as np

from benchmarks import beside_rivals
from benchmarks.beside_rivals import BARE, DDL, Found
from benchmarks.report import Spread

TIMES = {DDL: [1.0, 2.0, 1.0], "fit": [3.0, 4.0, 3.0], "fit, XLA": [2.0, 2.0, 2.0]}
RIVALS = {"fit": ["fit", "fit, XLA"], "Orbit": ["Orbit"]}


def found(**more):
    times = {**TIMES, **more}
    return Found({name: np.array(values) for name, values in times.items()}, {"Orbit": "skipped"})


def test_the_fastest_of_a_rival_counts_and_one_that_failed_is_left_out():
    (bar,) = beside_rivals.bars("GPT", found(), RIVALS)
    assert bar.what == "GPT: ddl's speed / fit's"
    assert bar.value == Spread(2.0, 1.0, 2.0, True)  # of the processes beside each other
    assert bar.verdict == "met"
    assert beside_rivals.notes({"GPT": found()}) == ["Orbit, GPT: skipped"]


def test_the_bare_loop_is_a_limit_of_the_time():
    *_, bar = beside_rivals.bars("GPT", found(**{BARE: [0.8, 1.6, 0.8]}), RIVALS)
    assert (bar.value.median, bar.kind, bar.verdict) == (1.25, "at most", "missed")


def test_processes_take_turns_and_one_that_fails_is_named():
    functions = {
        name: f"tests.benchmarks.turn_cases:{each}"
        for name, each in (("works", "contender"), ("skipped", "skips"))
    }
    run = beside_rivals.run(functions, "works", processes=2, rounds=2)
    assert {name: len(values) for name, values in run.times.items()} == {"works": 2}
    assert run.failures == {"skipped": "no such package"}
    table = beside_rivals.milliseconds("ms", {"case": run}, [*functions])
    assert [row[1] == "–" for row in table.rows] == [False, True]
