"""Loading, macros read and set, imports."""

import re
import subprocess
import sys

import pytest

from ddl import config
from ddl.errors import ConfigError
from tests.config.dummies import complaint


@pytest.mark.parametrize("name", ["files", "params", "search_path", "allowed_unused"])
def test_a_text_is_not_read_letter_by_letter(name):
    with pytest.raises(ConfigError, match=f"argument {name} .* must be a list, got the text 'ab'"):
        config.load(**{"files": [], name: "ab"})


def test_import_registers_and_is_written_down(write):
    module = "import gin\n@gin.register\ndef from_far_away(x): return x"
    write(module, "far_away.py")
    config.load([write("import far_away\nfrom_far_away.x = 3")])
    assert config.build("from_far_away") == 3
    assert config.operative_config_text().startswith("import far_away\n")
    message = complaint(config.load, [write("\nimport far_awya")])
    assert message.startswith("run.gin:2: Cannot import far_awya")


@pytest.mark.parametrize(
    ("module", "reason", "line"),
    [
        ("\n{}['a']", "Importing failing raised KeyError: 'a'.", "2\n    {}['a']"),
        ("a = )", "Importing failing raised SyntaxError: unmatched ')'", "1\n    a = )"),
        ("import nowhere", "Cannot import failing: No module named 'nowhere'. Install it", "1\n"),
        (
            "import gin\n@gin.register\ndef a(): pass\n@gin.register\ndef a(): pass",
            "Importing failing registers failing.a a second time. Remove one of the two, or give",
            "4\n    @gin.register",
        ),
        (
            "import argparse\nargparse.ArgumentParser().exit(0)",
            "Importing failing ended the process by sys.exit(0). Call it only under `if __name__",
            "2\n    argparse.ArgumentParser().exit(0)",
        ),
    ],
    ids=["raises", "syntax", "imports", "registers", "exits"],
)
def test_a_module_that_cannot_be_imported(write, module, reason, line):
    write(module, "failing.py")
    with pytest.raises(ConfigError) as caught:
        config.load([write("\nimport failing")])
    message = str(caught.value)
    assert message.startswith(f"run.gin:2: {reason}")
    assert f"    import failing\n  raised in failing.py:{line}" in message


def test_an_import_that_fails_by_the_system_stays_as_it_is(write):
    write("raise ConnectionResetError", "unreachable.py")
    with pytest.raises(ConnectionResetError):
        config.load([write("import unreachable")])


def test_the_places_of_names_that_an_error_mentions(load):
    load("STEPS = 3\nTrial.steps = %STEPS\nTrial.rate = 0.5\na/Trial.rate = 1.5")
    places = config.places_mentioned
    assert places("Trial.steps must be even.") == ["  run.gin:1: STEPS = 3"]
    assert places("Set STEPS = 4.") == ["  run.gin:1: STEPS = 3"]
    assert places("Trial.rate is low.") == ["  run.gin:3: Trial.rate = 0.5"]
    assert places("a/Trial.rate is low.") == ["  run.gin:4: a/Trial.rate = 1.5"]
    assert places("run.gin:3: Trial.rate, Trial.rates, OTHER_STEPS and Trial") == []


def test_a_macro_set_by_the_program_stands_in_both_texts(load):
    load("SEED = None\nTrial.seed = %SEED")
    assert config.get_macro("SEED") is None
    assert config.get_macro("OTHER") is None
    config.set_macro("SEED", 7)
    config.set_macro("OTHER", (1, 2))
    assert config.get_macro("SEED") == 7
    assert config.build("Trial").values["seed"] == 7
    config.check_all_used()
    for text in (config.config_text(), config.operative_config_text()):
        assert re.search(r"^SEED = 7$", text, re.MULTILINE)
        assert re.search(r"^OTHER = \(1, 2\)$", text, re.MULTILINE)
    with pytest.raises(ValueError, match="cannot be written"):
        config.set_macro("SEED", object())


@pytest.mark.parametrize(
    "value",
    [
        None,
        -1.5e-300,
        {"long": "word " * 60, "deep": ["word " * 60, {"bytes": (b"ab" * 80, None, {})}]},
        {("word " * 60, 1): "a = b\nc # no comment"},
        'it\'s "quoted" \\ \t' * 20,
        list(range(300)),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_values_arrive_as_written(load, value):
    load(f"MACRO = {value!r}\nOTHER = %MACRO\nTrial.tower = %OTHER\nTrial.pictures = {value!r}")
    values = config.build("Trial").values
    assert values["tower"] == values["pictures"] == config.get_macro("OTHER") == value


def test_reading_a_macro_uses_it(load):
    load("SEED = 3")
    assert config.get_macro("SEED") == 3
    config.check_all_used()


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A folder with a config and modules beside it; another one is the working directory."""
    for name in ("here", "configs"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("beside_it", "helper_of_it"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path / "configs"


def test_a_module_beside_its_config_is_found_from_any_folder(elsewhere):
    module = (
        "import gin, helper_of_it\n@gin.register\ndef from_beside(x):\n"
        "    import later_helper\n    return x"
    )
    (elsewhere / "beside_it.py").write_text(module)
    (elsewhere / "helper_of_it.py").write_text("")
    (elsewhere / "later_helper.py").write_text("")
    (elsewhere / "run.gin").write_text("import beside_it\nfrom_beside.x = 3")
    (elsewhere.parent / "here" / "outer.gin").write_text("include '../configs/run.gin'")
    before = list(sys.path)
    config.load(["outer.gin"])
    assert config.build("from_beside") == 3
    assert sys.path == [*before, str(elsewhere)]


def test_it_is_found_last(elsewhere):
    """No module beside a config hides another."""
    (elsewhere / "textwrap.py").write_text("raise KeyError('hides')")
    (elsewhere / "run.gin").write_text("import textwrap\nimport absent_of_it")
    sys.modules.pop("textwrap")
    message = complaint(config.load, [str(elsewhere / "run.gin")])
    assert "Cannot import absent_of_it" in message
    assert "put it beside the config" in message
    assert str(elsewhere) not in sys.path


def test_importing_config_does_not_import_tensorflow():
    program = (
        "import sys, ddl.config; sys.exit('tensorflow' in sys.modules or 'keras' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
