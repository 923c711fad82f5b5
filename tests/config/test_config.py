"""Configs: places and remedies of mistakes, macros, unused bindings and saved texts.

tests/contract/test_wrong_configs.py has the table of common mistakes.
"""

import sys

import gin
import pytest

from ddl import config
from ddl.config import registry, statements
from ddl.config.registry import register
from ddl.errors import ConfigError
from tests.config.items import Color, pictures


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("RATE = 1.0\nTrial.rate = %RAET", "run.gin:2: %RAET is not defined. Did you mean RATE?"),
        ("Trial.steps = %SEED", "Add include 'standard.gin'"),
        ("Trial.rate = ten", "run.gin:1: Cannot parse this: Failed to parse token 'ten'. Write"),
        ("include 'run.gni'", "Did you mean run.gin?"),
        ("Trial.rate = 1.0\ninclude 'standard.gin'", "run.gin:2: Move this include above"),
        ("Trial.other = @Twin()", "Ambiguous .*items.(left|right).Twin.*items.(left|right).Twin"),
        ("import broken", "(?s)run.gin:1: Cannot import broken: broken.py:1 raised KeyError: 'a'"),
    ],
)
def test_a_mistake_is_named_with_its_place(load, write, text, message):
    write("{}['a']", "broken.py")
    with pytest.raises(ConfigError, match=message):
        load(text)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("Trial.mode = 'trian'", "'train', 'eval'"),
        ("Trial.limits = {'a': 'b'}", "got {'a': 'b'}"),
        ("Trial.judge = @Mute()", r"Judge \| None, got @Mute\(\)"),
        ("Trial.rate = @halving", "must be float, got @halving"),
        ("Trial.kind = @Lenient()", "must be type"),
    ],
)
def test_a_wrong_type_is_named_before_anything_is_built(load, line, message):
    with pytest.raises(ConfigError, match=f"run.gin:1: .*{message}"):
        load(line)


@pytest.mark.parametrize(
    "line",
    [
        "Trial.rate = 1",
        "Trial.steps = None",
        "Trial.factor = None",
        "Trial.shape = ()",
        "Trial.judge = @Lenient()",
        "Trial.kind = @Lenient",
        "Trial.other = [@tower(), @tower, {'a': %items.Color.RED}]",
    ],
)
def test_a_right_type_passes(load, line):
    load(line)
    config.build("Trial")


def test_constants_of_gin_and_of_an_enum(load):
    load("Trial.other = [%Color.RED, %LIMIT, %items.LIMIT]")
    assert config.build("Trial").values["other"] == [Color.RED, 7, 7]
    with pytest.raises(ConfigError, match="%Color.BLUE is not defined"):
        load("Trial.other = %Color.BLUE")


def test_an_error_of_a_call_names_its_bindings(load):
    load("Trial.rate = -1.0\nTrial.steps = 3")
    with pytest.raises(ConfigError, match="(?s)Trial cannot be .*below 0.*  run.gin:1: Trial"):
        config.build("Trial")
    load("Trial.other = @pictures()")
    with pytest.raises(ConfigError, match="pictures .* add its bindings: .*missing.*'split'"):
        config.build("Trial")


def test_the_places_of_names_that_an_error_mentions(load):
    load("STEPS = 3\nTrial.steps = %STEPS\nTrial.rate = 0.5\na/Trial.rate = 1.5")
    places = config.places_mentioned
    assert places("Trial.steps must be even.") == ["  run.gin:1: STEPS = 3"]
    assert places("a/Trial.rate is low.") == ["  run.gin:4: a/Trial.rate = 1.5"]
    assert places("run.gin:3: Trial.rate, Trial.rates, OTHER_STEPS and Trial") == []


def test_a_macro_set_by_the_program(load):
    load("SEED = None\nTrial.steps = %SEED")
    config.set_macro("SEED", 7)
    assert config.build("Trial").values["steps"] == config.get_macro("SEED") == 7
    assert "SEED = 7\n" in config.config_text()
    assert "SEED = 7\n" in config.operative_config_text()


def test_a_value_that_was_built_ahead_is_built_once(load):
    load("Trial.other = [@tower()]")
    assert config.build_bound("Trial", "other") is config.build("Trial").values["other"]
    assert "Trial.other = [@tower()]\n" in config.operative_config_text()
    assert config.build_bound("Trial", "names") is None


USED = """RATE = 0.5
Trial.rate = %RATE
Trial.other = @tower()
Trial.pictures = [@train/pictures(), @test/pictures()]
tower.width = %WIDTH
WIDTH = 3
pictures.size = 1
train/pictures.split = 'a'
test/pictures.split = 'b'
"""


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("trian/pictures.size = 3", "trian/pictures.size is never used. Did you mean"),
        ("cabin.height = 3", "cabin.height is never used. Nothing refers to it"),
        ("pictures.split = 'c'", "pictures.split is never used"),
        ("FAR = 3", "FAR is never used"),
    ],
)
def test_an_unused_binding_is_an_error_unless_it_is_allowed(load, line, message):
    load(USED + line)
    config.build("Trial")
    with pytest.raises(ConfigError, match=f"run.gin:10: {message}"):
        config.check_all_used()
    assert config.check_all_used([line.split(" =")[0]]) == []


def test_all_are_used(load):
    load(USED + "Trial.schedule = @halving\nhalving.every = %EVERY\nEVERY = 2")
    config.build("Trial")
    assert config.check_all_used() == []


def test_bindings_of_what_was_replaced_go_unused_in_one_line(load):
    load(USED, "Trial.other = @cabin()")
    config.build("Trial")
    (line,) = config.check_all_used()
    assert line.startswith("--gin_param:1 replaced")
    assert "tower.width" in line
    assert "WIDTH" in line
    assert "tower" not in config.config_text()
    load(USED, "Trial.other = 'cabin'")
    config.build("Trial")
    assert "tower.width" in config.check_all_used()[0]
    load(USED, "Trial.other = @cabin()", "tower.width = 4")
    config.build("Trial")
    with pytest.raises(ConfigError, match="tower.width is never used"):
        config.check_all_used()
    load(USED, "Trial.other = None")  # nothing takes its place
    config.build("Trial")
    with pytest.raises(ConfigError, match="tower.width is never used"):
        config.check_all_used()


def test_macros_that_nothing_refers_to_are_told_at_once(write):
    run = write("SEED = 3\nRATE = 1.0\nTrial.rate = %RATE\nRATES = 2.0\nTRAIN_STEPS = 3")
    with pytest.raises(ConfigError, match="(?s)RATES is never used. .* RATE?.*standard.gin"):
        config.load([run], allowed_unused=[])
    config.load([run], allowed_unused=["RATES", "TRAIN_*"])


@pytest.mark.parametrize("name", ["digits_cnn.gin", "configs/digits_cnn.gin"])
def test_a_config_of_ddl_is_found_from_any_folder(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert any("GLOBAL_BATCH_SIZE" in str(one) for one in statements.Reader().file(name))


def test_a_file_is_read_once(write):
    write("RATE = 1.0\nTrial.rate = %RATE", "base.gin")
    first = write("include 'base.gin'\nRATE = 2.0", "first.gin")
    config.load([first, write("include 'base.gin'\nA = 1", "second.gin")])
    assert config.build("Trial").values["rate"] == 2.0


def test_the_texts_repeat_the_run(load, write):
    load(USED + "Trial.limits = {'zebra': 1, 'ant': 2}\nTrial.names = ['a word ' 'and more']")
    first = config.build("Trial").values
    for text in (config.config_text(), config.operative_config_text()):
        config.load([write(text, "saved.gin")])
        again = config.build("Trial").values
        assert list(again["limits"]) == ["zebra", "ant"]
        assert again == first
        config.check_all_used()
    assert config.operative_config_text() == text


def test_a_users_item_keeps_its_name_beside_one_of_keras(load, monkeypatch):
    gin.external_configurable(pictures, "Permute", "items")
    monkeypatch.setattr(registry, "register", register)
    load("Trial.other = @GroupedQueryAttention()")  # its name in keras.layers is another
    load()
    config.build("items.Permute", "a")
    assert config.operative_config_text() == "items.Permute.size = 3\n"
    with pytest.raises(ConfigError, match="Ambiguous .*keras.layers.Permute.*items.Permute"):
        load("Trial.other = @Permute()")


def test_a_module_beside_its_config_is_found(tmp_path, write, monkeypatch):
    (tmp_path / "far").mkdir()
    write("import gin\n@gin.register\ndef from_beside(x): return x", "far/beside_it.py")
    monkeypatch.setattr(sys, "path", [*sys.path])
    config.load([write("import beside_it\nfrom_beside.x = 3", "far/run.gin")])
    assert config.build("from_beside") == 3
