"""Values of the right and of the wrong type."""

import pytest

from tests.config.dummies import complaint


@pytest.mark.parametrize(
    ("binding", "words"),
    [
        ("Trial.steps = '5'", "must be int | None, got '5'. Write 5 without quotation marks."),
        ("Trial.steps = 5.0", "must be int | None, got 5.0. Write 5."),
        ("Trial.steps = True", "must be int | None, got True"),
        ("Trial.rate = False", "must be float, got False"),
        ("Trial.rate = None", "must be float, got None"),
        ("Trial.shape = (8, 'a')", "must be tuple[int, ...], got (8, 'a')"),
        ("Trial.shape = (8, True)", "got (8, True)"),
        ("Trial.shape = [8, 8]", "Write (8, 8)."),
        ("Trial.shape = (8)", "Write (8,)."),
        ("Trial.names = 'loss'", "Write ('loss',)."),
        ("Trial.mode = 'trian'", "Did you mean train?"),
        ("Trial.judge = @Lenient", "Write @Lenient() with parentheses."),
        ("Trial.judges = [@Lenient]", "Write [@Lenient()] with parentheses."),
        ("Trial.judge = @Mute()", "got @Mute()"),
        ("Trial.judge = 'Lenient'", "Judge"),
        ("Trial.schedule = @halving()", "Write @halving without parentheses."),
        ("Trial.schedule = @Mute()", "Write @Mute without parentheses."),
        ("Trial.kind = @Mute()", "Write @Mute without parentheses."),
        ("Trial.kind = @halving", "got @halving"),
        ("Trial.optimizer = @SGD", "Write @SGD() with parentheses."),
        ("Trial.optimizer = @Dense()", "got @Dense()"),
        ("Trial.steps = @halving()", "got @halving()"),
    ],
)
def test_values_of_the_wrong_type(load, binding, words):
    message = complaint(load, f"\n\n{binding}")
    name = binding.partition(" ")[0]
    assert message.startswith(f"run.gin:3: {name} must be ")
    assert words in message


@pytest.mark.parametrize(
    "binding",
    [
        "Trial.rate = 3",
        "Trial.steps = None",
        "Trial.factor = None",
        "Trial.shape = ()",
        "Trial.names = ['a', 'b']",
        "Trial.judge = @Lenient()",
        "Trial.judge = @scope/Lenient()",
        "Trial.judge = @tower()",  # says nothing of what it returns
        "Trial.judges = (@Lenient(), @tower())",
        "Trial.things = [@Lenient()]",
        "Trial.schedule = @halving",
        "Trial.kind = @Lenient",
        "Trial.tower = [1, {'a': (True, @tower)}]",
        "Trial.unknown = 3",
        "Trial.optimizer = @SGD()",
        "Trial.rate = @halving()",
        "Trial.steps = %SEED",  # set by the program
    ],
)
def test_values_of_the_right_type(load, binding):
    load(f"SEED = None\n{binding}")


def test_a_macro_of_the_wrong_type_is_reported_where_it_is_set(load, write):
    write("RATE = 1.0\nTrial.rate = %RATE", "other.gin")
    message = complaint(load, "include 'other.gin'\nRATE = %OTHER\nOTHER = 'fast'")
    assert message.startswith("run.gin:2: Trial.rate must be float, got 'fast'.")
    assert "The value is that of %RATE, used at other.gin:2." in message


def test_a_macro_inside_a_value(load):
    message = complaint(load, "SIDE = 'a'\nTrial.shape = (8, %SIDE)")
    assert message.startswith("run.gin:2: Trial.shape must be tuple[int, ...], got (8, 'a')")
