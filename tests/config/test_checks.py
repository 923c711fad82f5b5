"""Errors for names in a config that cannot be right."""

import re

import pytest

from ddl import config
from ddl.errors import ConfigError
from tests.config.dummies import complaint


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Trail.rate = 1.0", "Trail is not registered. Did you mean Trial"),
        ("Trial.rat = 1.0", "Trial has no parameter rat. Did you mean rate?"),
        ("tower.height = 1", "tower has no parameter height. It has filters, width, names."),
        ("Mute.volume = 1", "Mute has no parameter volume. It has none."),
        ("Trial.tower = @towre()", "towre is not registered. Did you mean tower"),
        ("Trial.names = [1, {'a': @towre}]", "Did you mean tower"),
        ("RATES = 1\nTrial.rate = %RATE", "%RATE is not defined. Did you mean RATES?"),
        ("Trial.rate = %FAR", "%FAR is not defined. Add a line FAR = …."),
        ("A = %B\nB = %A", "refer to each other in a cycle: %B -> %A -> %B"),
        ("forwarding.momentun = 1", "no parameter momentun. Did you mean momentum?"),
        ("SGD.momentun = 1", "SGD has no parameter momentun. Did you mean momentum?"),
        ("Dense.trainabel = 1", "Did you mean trainable?"),
        ("forwarding.momentum = @Twin()", "Twin is ambiguous. Write dummies.left.Twin or"),
        ("Identity.name = 'a'", "keras.initializers.Identity or keras.layers.Identity"),
        ("Trial.tower = @InPlace()", "@gin.register"),
        ("macro.value = 3\nTrial.rate = 1", ""),
    ],
)
def test_names_that_cannot_be_right(load, text, words):
    if not words:  # Accepted, if odd: how gin spells a macro without a name.
        load(text)
        return
    with pytest.raises(ConfigError) as caught:
        load(text)
    lines = text.splitlines()
    assert f"run.gin:{1 if words.startswith('refer to') else len(lines)}: " in str(caught.value)
    assert words in str(caught.value)
    assert f"\n    {lines[-1]}" in str(caught.value)


def test_what_an_imported_module_does_not_register(load, write):
    text = "from json import loads\ndef chart():\n    return 1\n"
    write(text, "unregistered_chart.py")
    remedy = "is not registered. Put @gin.register above chart in unregistered_chart."
    for name in ("chart", "unregistered_chart.chart"):
        with pytest.raises(ConfigError, match=f"run.gin:2: {name} {re.escape(remedy)}"):
            load(f"import unregistered_chart\nTrial.rate = @{name}()")
    with pytest.raises(ConfigError, match="loads is not registered. Import its module"):
        load("import unregistered_chart\nTrial.rate = @loads()")


def test_names_that_kwargs_take(load):
    load("forwarding.block_2 = 1\nforwarding.activity = 2\nDense.name = 'd'\nDense.units = 1")
    assert config.build("forwarding")[1] == {"block_2": 1, "activity": 2}
    assert config.build("Dense").name == "d"


def test_all_complaints_come_at_once(load):
    message = complaint(load, "Trail.rate = 1\nTrial.rat = 2\nTrial.steps = %NONE")
    assert [f"run.gin:{line}:" in message for line in (1, 2, 3)] == [True] * 3


def test_the_same_binding_twice_in_a_file(load, write):
    message = complaint(load, "Trial.rate = 1.0\nA = 1\ndummies.Trial.rate = 2.0")
    assert message.startswith("run.gin:3: Trial.rate is already set at run.gin:1.")
    write("Trial.rate = 1.0", "other.gin")
    load("include 'other.gin'\nTrial.rate = 2.0\na/Trial.rate = 3.0", "Trial.rate = 4.0")
    assert config.build("Trial").values["rate"] == 4.0


def test_a_file_included_twice_gives_nothing_twice(load, write):
    write("Trial.rate = 1.0", "common.gin")
    write("include 'common.gin'", "other.gin")
    load("include 'other.gin'\ninclude 'common.gin'")
    assert config.build("Trial").values["rate"] == 1.0


def test_a_value_above_an_include_that_sets_it_again(load, write):
    write("Trial.rate = 1.0\nRATE = 2.0", "common.gin")
    write("include 'common.gin'\nTrial.steps = %STEPS\nSTEPS = 3", "other.gin")
    message = complaint(load, "dummies.Trial.rate = 5.0\ninclude 'common.gin'\nTrial.steps = 1")
    assert message.startswith("run.gin:1: Trial.rate is overridden by common.gin:1, which run.gin ")
    assert "\n    dummies.Trial.rate = 5.0" in message
    message = complaint(load, "RATE = 5.0\ninclude 'other.gin'")
    assert message.startswith("run.gin:1: RATE is overridden by common.gin:2")
    load("Trial.rate = 1.0\ninclude 'common.gin'\nSTEPS = 4\nTrial.steps = %STEPS\nRATE = %STEPS")
    load("Trial.rate = 5.0\ninclude 'common.gin'", "Trial.rate = 6.0")
    assert config.build("Trial").values["rate"] == 6.0


def test_a_file_read_again_sets_nothing_back(load, write):
    write("STEPS = None\nRATE = 1.0", "common.gin")
    base = write("include 'common.gin'\nSTEPS = 3\nTrial.steps = %STEPS", "base.gin")
    again = write("include 'common.gin'\nRATE = 2.0\nTrial.rate = %RATE", "again.gin")
    message = complaint(config.load, [base, again])
    assert message.startswith("base.gin:2: STEPS is reset by common.gin:1, which is read a second")
    assert "RATE" not in message
    assert complaint(load, "include 'base.gin'\ninclude 'again.gin'") == message
    config.load([base, write("RATE = 2.0\nTrial.rate = %RATE", "again.gin")])
    config.load([base, base])
    assert config.build("Trial").values["steps"] == 3


def test_a_value_that_cannot_be_written_down(load):
    assert complaint(load, "\nTrial.rate = 1e999").startswith("run.gin:2: inf cannot be written")


def test_integers_beyond_64_bits(load):
    message = complaint(load, "UNITS = 9223372036854775808\nDense.units = %UNITS\ntower.width = 1")
    assert message.startswith(
        "run.gin:1: Dense.units must fit into 64 bits, got 9223372036854775808. Set a smaller"
    )
    load("tower.width = 9223372036854775808")  # the user's own may take it


@pytest.mark.parametrize("value", ["'%UNITS'", "('%UNITS', 3)", "'@tower()'", "'@train/tower'"])
def test_a_macro_or_reference_in_quotation_marks(load, value):
    written = value.split("'")[1]
    message = complaint(load, f"UNITS = 3\nTrial.steps = {value}")
    assert f"Write {written} without quotation marks." in message


def test_a_macro_of_the_standard_file(load):
    message = complaint(load, "Trial.seed = %SEED")
    assert "%SEED is not defined. Add include 'standard.gin', which defines it, as the" in message


def test_a_chain_of_macros_that_is_as_good_as_endless(load):
    chain = "\n".join(f"A{n} = %A{n + 1}" for n in range(60))
    message = complaint(load, f"{chain}\nA60 = 1")
    assert "%A1 must lead to its value by at most 50 macros, got more. Refer to a" in message
