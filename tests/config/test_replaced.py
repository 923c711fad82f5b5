"""Configs that replace a reference of the config they include."""

import pytest

from ddl import config
from tests.config.dummies import complaint

BASE = """
WIDTH = 3
Trial.tower = @tower()
Trial.pictures = [@train/pictures(), @test/pictures()]
Trial.rate = 0.5
tower.width = %WIDTH
tower.filters = (8,)
pictures.size = 1
train/pictures.split = 'a'
test/pictures.split = 'b'
"""

SWAP = "Trial.tower = @forwarding()"


@pytest.fixture
def derive(write):
    """Loads a config that includes BASE, and builds the trial."""

    def derive(*lines, base=BASE, params=()):
        write(base, "base.gin")
        config.load([write("\n".join(["include 'base.gin'", *lines]))], params)
        config.build("Trial")

    return derive


def test_bindings_of_what_was_replaced_go_unused_and_are_told(derive):
    derive(SWAP, "forwarding.momentum = 2.0")
    assert config.check_all_used() == [
        "run.gin:2 replaces @tower(), so these included bindings have no effect: tower.width, "
        "tower.filters, WIDTH."
    ]
    assert "tower." not in config.config_text()
    assert config.check_all_used() == []


def test_the_saved_config_is_one_of_a_run(derive, write):
    derive(SWAP)
    config.check_all_used()
    saved = config.config_text()
    config.load([write(saved, "saved.gin")])
    config.build("Trial")
    assert config.check_all_used() == []
    assert config.differences(saved) == []


def test_a_reference_in_a_scope(derive):
    derive("Trial.pictures = [@test/pictures()]")
    (line,) = config.check_all_used()
    assert line.endswith("have no effect: train/pictures.split.")


def test_so_do_those_behind_a_macro(derive):
    base = BASE.replace("Trial.tower = @tower()", "Trial.tower = %TOWER\nTOWER = @tower()")
    for line, dropped in (("TOWER = @forwarding()", ""), (SWAP, "TOWER")):
        derive(line, base=base)
        (told,) = config.check_all_used()
        assert "tower.width" in told
        assert dropped in told


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["Trial.rate = 0.1", "RATES = 3"], "run.gin:3: RATES is never used"),
        (
            [SWAP, "tower.width = 4"],
            "run.gin:3: tower.width is never used",
        ),
        ([SWAP, "WIDTH = 4"], "run.gin:3: WIDTH is never used"),
        (
            [
                SWAP,
                "forwarding.momentum = 1.0",
                "x/forwarding.momentum = 2.0",
            ],
            "not in scope x",
        ),
    ],
)
def test_a_typo_in_the_including_file_stays_an_error(derive, lines, message):
    derive(*lines)
    assert message in complaint(config.check_all_used)


def test_so_does_an_unused_binding_of_the_included_file(derive):
    for line in ("FAR = 3", "late/tower.width = 1", "pictures.split = 'c'"):
        derive(SWAP, base=f"{BASE}{line}\n")
        assert complaint(config.check_all_used).startswith("base.gin:11: ")
        derive("Trial.rate = 0.1", base=f"{BASE}{line}\n")
        assert complaint(config.check_all_used).startswith("base.gin:11: ")


def test_only_an_include_derives(derive, write):
    """Not a file after another, nor a --gin_param."""
    write(BASE, "base.gin")
    later = write(SWAP)
    for files, params in (
        (["base.gin", later], ()),
        (["base.gin"], [SWAP]),
    ):
        config.load(files, params)
        config.build("Trial")
        assert "tower.width is never used" in complaint(config.check_all_used)
