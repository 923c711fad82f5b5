"""Values of the right and of the wrong type."""

import pytest

from ddl.config import registry
from tests.config.dummies import complaint

OWN = registry.OWN  # the fixture of this folder empties it


@pytest.mark.parametrize(
    ("binding", "words"),
    [
        (
            "Trial.steps = '5'",
            "must be a whole number or None, got '5'. Write 5 without quotation marks.",
        ),
        ("Trial.steps = 5.0", "must be a whole number or None, got 5.0. Write 5."),
        ("Trial.steps = True", "must be a whole number or None, got True"),
        ("Trial.rate = False", "must be a number, got False"),
        ("Trial.rate = None", "must be a number, got None"),
        ("Trial.shape = (8, 'a')", "must be a tuple of whole numbers, got (8, 'a')"),
        ("Trial.shape = (8, True)", "got (8, True)"),
        ("Trial.shape = [8, 8]", "Write (8, 8)."),
        ("Trial.shape = (8)", "Write (8,)."),
        ("Trial.names = 'loss'", "Write ('loss',)."),
        ("Trial.mode = 'trian'", "must be 'train' or 'eval', got 'trian'. Did you mean train?"),
        (
            "Trial.limits = 'a'",
            "must be a number, a dict (a text: a number or None) or None, got 'a",
        ),
        ("Trial.names = 3", "must be a list of texts, got 3"),
        ("Trial.schedule = 3", "must be a function or None, got 3"),
        (
            "Trial.judges = 3",
            "a list that holds a Judge (an object with the method verdict), got 3",
        ),
        ("SGD.learning_rate = '0.1'", "must be a number, got '0.1'. Write 0.1 without quotation"),
        ("SGD.momentum = 'high'", "must be a number, got 'high'"),
        ("Trial.judge = @Lenient", "Write @Lenient() with parentheses."),
        ("Trial.judges = [@Lenient]", "Write [@Lenient()] with parentheses."),
        ("Trial.judge = @Mute()", "got @Mute(). Give Mute the method verdict."),
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
    assert message.startswith("run.gin:2: Trial.rate must be a number, got 'fast'.")
    assert "The value is that of %RATE, used at other.gin:2." in message


def test_a_macro_inside_a_value(load):
    message = complaint(load, "SIDE = 'a'\nTrial.shape = (8, %SIDE)")
    assert message.startswith(
        "run.gin:2: Trial.shape must be a tuple of whole numbers, got (8, 'a')"
    )


def test_what_could_be_a_task(load, monkeypatch):
    monkeypatch.setattr(registry, "OWN", OWN)
    registry.register_all.cache_clear()
    message = complaint(load, "Trainer.task = @cnn()")
    assert message.startswith(
        "run.gin:1: Trainer.task must be a Task (an object with the method per_example) or a "
        "StepTask (an object with the method step), got @cnn(). Write Classification.model = "
        "@cnn(), and @Classification() here."
    )
    message = complaint(load, "Trainer.task = @Mute()")
    assert "got @Mute(). Give Mute the method per_example or step." in message
    message = complaint(load, "Trainer.optimizer = @Group()")
    assert "Optimizer" in message
    assert "Write" not in message  # ParameterGroups takes a list of such


@pytest.mark.parametrize(("name", "item"), [("SGD", "SGD"), ("adm", "Adam"), ("x", "SGD")])
def test_an_optimizer_by_name(load, monkeypatch, name, item):
    """It would train at Keras's default rate, while LEARNING_RATE has no effect."""
    monkeypatch.setattr(registry, "OWN", OWN)
    registry.register_all.cache_clear()
    message = complaint(load, f"OPTIMIZER = {name!r}\nTrainer.optimizer = %OPTIMIZER")
    assert message.startswith("run.gin:1: Trainer.optimizer must be a call of an optimizer, got ")
    assert f"Write Trainer.optimizer = @{item}(), and bind {item}.learning_rate = %LEARN" in message
    load("Trainer.optimizer = @SGD()\nSGD.learning_rate = @LearningRate()")
