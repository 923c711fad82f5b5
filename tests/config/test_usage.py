"""Bindings that no call has taken."""

import pytest

from ddl import config
from ddl.config import usage
from tests.config.dummies import complaint

USED = """
RATE = 0.5
Trial.rate = %RATE
Trial.pictures = [@train/pictures(), @test/pictures()]
pictures.size = 1
train/pictures.split = 'a'
test/pictures.split = 'b'
"""


def unused(text: str, load) -> str:
    load(text)
    config.build("Trial")
    return complaint(config.check_all_used)


def test_all_used(load):
    load(USED)
    config.build("Trial")
    config.check_all_used()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("RATES = 3", "RATES is never used. Did you mean RATE?"),
        ("FAR = 3", "FAR is never used. Nothing refers to %FAR."),
        ("trian/pictures.size = 3", "called in scope test or in scope train, not in scope trian. "
         "Did you mean train/pictures.size?"),
        ("tower.width = 3", "nothing calls tower. Refer to @tower() in another binding."),
        ("train/test/pictures.size = 3", "not in scope train/test"),
        ("pictures.split = 'c'", "each call of pictures takes split from another binding or"),
        ("tower.width = %WIDTH\nWIDTH = 3", "neither are the bindings that refer to it: tower"),
    ],
)  # fmt: skip
def test_unused(load, line, words):
    message = unused(USED + line, load)
    assert message.splitlines()[0].startswith("run.gin:8: ")
    assert words in message
    assert message.endswith("or pass their names to --gin_allow_unused.")


def test_a_shadowed_binding_is_used_if_one_call_takes_it(load):
    load(USED + "train/pictures.size = 3")
    config.build("Trial")
    config.check_all_used()
    message = unused(USED + "train/pictures.size = 3\ntest/pictures.size = 4", load)
    assert message.startswith("run.gin:5: pictures.size is never used")


def test_what_the_caller_passes_is_not_taken_from_the_config(load):
    load("Trial.rate = 0.5")
    config.build("Trial", rate=1.0)
    assert "Trial.rate is never used" in complaint(config.check_all_used)


def test_unused_may_be_allowed(load):
    load(USED + "tower.width = 3\nFAR = 1\ntrian/pictures.size = 2")
    config.build("Trial")
    config.check_all_used(["dummies.tower.*", "F*", "trian/pictures.size"])
    assert "FAR" not in complaint(config.check_all_used, ["FAR"])
    # Letter by letter, its last one would allow all.
    assert "must be a list, got the text 'F*'" in complaint(config.check_all_used, "F*")


def test_what_is_handed_over_uncalled_may_be_called_later(load):
    load("Trial.schedule = @late/halving\nhalving.every = %EVERY\nEVERY = 3\nb/halving.every = 1")
    config.build("Trial")
    message = complaint(config.check_all_used)
    assert message.startswith("run.gin:4: b/halving.every is never used")
    assert "EVERY =" not in message


def test_thousands_of_macros_are_looked_at_once_each(load, monkeypatch):
    number = 300
    load("".join(f"MACRO_{n} = {n}\n" for n in range(number)))
    looked = []
    leaves = usage.leaves
    monkeypatch.setattr(usage, "leaves", lambda value: looked.append(value) or leaves(value))
    message = complaint(config.check_all_used)
    assert message.count("is never used") == 20
    assert "280 further bindings are unused, 300 in all.\nRemove the unused" in message
    assert len(looked) == number


def test_shipped_defaults_are_never_reported(load, monkeypatch, tmp_path):
    monkeypatch.setattr("ddl.config.usage.PACKAGE_FOLDER", str(tmp_path))
    load("FAR = 3")
    config.check_all_used()


def test_macros_that_nothing_can_use_are_told_at_once(write):
    run = write("SEED = 3\nRATE = 1.0\nTrial.rate = %RATE\nRATES = 2.0\nOTHER = 3\nA/B = 4")
    message = complaint(config.load, [run], [], [], ["A/*"])
    assert message.splitlines() == [
        "run.gin:4: RATES is never used. Did you mean RATE?",
        "    RATES = 2.0",
        "run.gin:5: OTHER is never used. Nothing refers to %OTHER.",
        "    OTHER = 3",
        "Remove the unused bindings, or pass their names to --gin_allow_unused.",
    ]
    config.load([run])  # a program may read any macro
    write("", "reader.py")
    config.load([run, write("import reader", "other.gin")], allowed_unused=[])  # so may a module
    assert config.get_macro("OTHER") == 3


def test_a_macro_whose_only_use_is_overridden(write):
    base = write("STEPS = 3\nEPOCHS = 4\nTrial.steps = %STEPS\nTrial.rate = 0.5", "base.gin")
    config.load([write(f"include '{base}'\nTrial.steps = 5\nTrial.seed = %EPOCHS")])
    config.build("Trial")
    assert complaint(config.check_all_used).splitlines()[:2] == [
        "base.gin:1: STEPS is never used: Trial.steps refers to it at base.gin:3, but is 5 at "
        "run.gin:2. Remove that binding or this one.",
        "    STEPS = 3",
    ]


def test_a_macro_that_is_a_text_or_of_the_standard_file(write):
    run = write("UNITS = 3\nTrial.names = ['%UNITS']\nTRAIN_STEPS = 3")
    first, _, second, *_ = complaint(config.load, [run], [], [], []).splitlines()
    assert first.endswith("'%UNITS' at run.gin:2 is a text. Remove its quotation marks.")
    assert second.endswith("Add include 'standard.gin', which defines it, as the first line.")
