"""Configs as people write them, right and wrong; what is asserted is what they would read."""

import collections.abc
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import gin
import keras
import numpy as np
import pytest

from ddl import config, registry
from ddl.config.parsing import PACKAGE_FOLDER
from ddl.errors import ConfigError, DataError

# ------------------------------------------------------------------ what the configs configure


class Judge(Protocol):
    def verdict(self) -> str: ...


@gin.register(module="dummies")
class Lenient:
    def verdict(self) -> str:
        return "fine"


@gin.register(module="dummies")
class Mute:
    pass


@gin.register(module="dummies")
class Trial:
    def __init__(
        self,
        judge: Judge | None = None,
        tower=None,
        pictures=None,
        steps: int | None = None,
        rate: float = 0.1,
        shape: tuple[int, ...] = (),
        mode: Literal["train", "eval"] = "train",
        names: Sequence[str] = (),
        factor: int = None,  # noqa: RUF013 - the annotation that is so often written
        seed: int = 0,
        judges: Sequence[Judge] = (),
        schedule: Callable[[int], float] | None = None,
        kind: type | None = None,
        things: collections.abc.Sequence = (),
        unknown: "NowhereDefined" = None,  # noqa: F821
        optimizer: keras.optimizers.Optimizer | None = None,
    ):
        if rate < 0:
            raise ValueError(f"rate is {rate}, below 0")
        if rate > 100:
            raise DataError(f"rate is {rate}, a strange one")
        self.values = dict(locals())


@gin.register(module="dummies")
def tower(filters, width: int = 8, names=None):
    return ("tower", filters, width, names)


@gin.register(module="dummies")
def pictures(split, size=3, text="a 'quoted' text", tiny=1e-05, nothing=None, pair=(1, "b")):
    return (split, size, text, tiny, nothing, pair)


@gin.register(module="dummies")
def halving(step: int, every: int = 10) -> float:
    return 0.5 ** (step // every)


@gin.register(module="dummies")
def forwarding(momentum=0.0, block_1=None, **kwargs):
    return momentum, kwargs


@gin.register(module="dummies")
def demanding(amount=gin.REQUIRED, *, of):
    return amount, of


@gin.register("Twin", module="dummies.left")
def left_twin():
    pass


@gin.register("Twin", module="dummies.right")
def right_twin():
    pass


@gin.configurable(module="dummies")
class InPlace(keras.layers.Layer):
    def __init__(self, units=3):
        super().__init__()


@pytest.fixture(scope="module", autouse=True)
def _without_own_items():
    """These tests are about configs, not about what ddl offers to be configured."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "OWN", ())
        registry.register_all.cache_clear()
        yield
    registry.register_all.cache_clear()


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes files into the working directory, whose names messages then give."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(text: str, name: str = "run.gin") -> str:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        return name

    return write


@pytest.fixture
def load(write):
    def load(text: str = "", *params: str) -> None:
        config.load([write(text)], params)

    return load


def complaint(call, *arguments) -> str:
    with pytest.raises(ConfigError) as caught:
        call(*arguments)
    message = str(caught.value)
    assert not re.search(r"\bgin\.[A-Za-z_]|configurable", message)
    assert "Traceback" not in message
    return message


# ------------------------------------------------------------------ files


def test_later_files_and_params_override(write):
    one = write("RATE = 1.0\nTrial.rate = %RATE\nTrial.steps = 1")
    two = write("Trial.steps = 2", "other.gin")
    config.load([one, two], ["RATE = 3.0"])
    values = config.build("Trial").values
    assert (values["steps"], values["rate"]) == (2, 3.0)
    config.check_all_used()
    config.load([one])
    assert config.build("Trial").values["steps"] == 1


def test_include_is_found_beside_the_includer_then_on_the_search_path(write):
    write("Trial.steps = 5", "deep/other.gin")
    write("Trial.rate = 6.0", "library/shared.gin")
    run = write("include 'other.gin'\ninclude 'shared.gin'", "deep/run.gin")
    config.load([run], search_path=["library"])
    values = config.build("Trial").values
    assert (values["steps"], values["rate"]) == (5, 6.0)


def test_the_package_folder_is_searched():
    assert os.path.dirname(registry.__file__) == PACKAGE_FOLDER


def test_missing_file(write):
    write("", "configs/digits_cnn.gin")
    message = complaint(config.load, ["configs/digit_cnn.gin"])
    assert "no config file configs/digit_cnn.gin. Did you mean digits_cnn.gin?" in message
    assert "Looked in: configs" in message


def test_missing_include(write):
    write("", "deep/other.gin")
    run = write("\ninclude 'othre.gin'", "deep/run.gin")
    message = complaint(config.load, [run])
    assert message.startswith("deep/run.gin:2: There is no config file othre.gin.")
    assert "Did you mean other.gin?" in message


def test_unreadable_file(write, tmp_path):
    (tmp_path / "run.gin").write_bytes(b"A = '\xff'")
    assert "Cannot read the config file run.gin" in complaint(config.load, ["run.gin"])


def test_files_that_include_one_another(write):
    write("include 'run.gin'", "other.gin")
    message = complaint(config.load, [write("include 'other.gin'")])
    assert message.startswith("other.gin:1: run.gin includes itself")


def test_import_registers_and_is_written_down(write):
    module = "import gin\n@gin.register\ndef from_far_away(x): return x"
    write(module, "far_away.py")
    config.load([write("import far_away\nfrom_far_away.x = 3")])
    assert config.build("from_far_away") == 3
    assert config.operative_config_text().startswith("import far_away\n")
    message = complaint(config.load, [write("\nimport far_awya")])
    assert message.startswith("run.gin:2: Cannot import far_awya")


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("A = 1\nMODE = train", 2, "Text needs quotation marks ('train')"),
        ("RATE = 1/3", 1, "without arithmetic"),
        ("Trial.rate", 1, "Expected NAME = value"),
        ("A =\nB = 1", 1, "Expected a value"),
        ("A = 1\nB = (1, 2\nC = 3\n", 3, ""),
        ("A = (1,\n", 2, "never closed"),
        ("Trial . rate = 3", 1, "without spaces"),
        ("from __gin__ import dynamic_registration", 1, "dynamic registration"),
    ],
)
def test_what_cannot_be_parsed(load, text, line, words):
    message = complaint(load, text)
    assert message.startswith(f"run.gin:{line}: ")
    assert words in message


def test_a_param_is_shown_as_typed(load):
    message = complaint(load, "", "RATE = fast")
    assert message.startswith("--gin_param 'RATE = fast': fast is not a value.")


# ------------------------------------------------------------------ names


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Trail.rate = 1.0", "Trail is not registered. Did you mean Trial"),
        ("Trial.rat = 1.0", "Trial has no parameter rat. Did you mean rate?"),
        ("tower.height = 1", "tower has no parameter height. It has: filters, width, names."),
        ("Mute.volume = 1", "Mute has no parameter volume. It has none."),
        ("Trial.tower = @towre()", "towre is not registered. Did you mean tower"),
        ("Trial.names = [1, {'a': @towre}]", "Did you mean tower"),
        ("RATES = 1\nTrial.rate = %RATE", "%RATE is not defined. Did you mean RATES?"),
        ("Trial.rate = %FAR", "%FAR is not defined. Add a line FAR = …"),
        ("A = %B\nB = %A", "defined by one another: %B -> %A -> %B"),
        ("forwarding.momentun = 1", "no parameter momentun. Did you mean momentum?"),
        ("SGD.momentun = 1", "SGD has no parameter momentun. Did you mean momentum?"),
        ("Dense.trainabel = 1", "Did you mean trainable?"),
        ("forwarding.momentum = @Twin()", "Twin is ambiguous: write dummies.left.Twin or"),
        ("Identity.name = 'a'", "keras.initializers.Identity or keras.layers.Identity"),
        ("Trial.tower = @InPlace()", "@gin.register"),
        ("demanding.amount = %gin.REQUIRED", "demanding.amount must be given"),
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
    assert f"run.gin:{1 if words.startswith('defined') else len(lines)}: " in str(caught.value)
    assert words in str(caught.value)
    assert f"\n    {lines[-1]}" in str(caught.value)


def test_names_that_kwargs_take(load):
    load("forwarding.block_2 = 1\nforwarding.activity = 2\nDense.name = 'd'\nDense.units = 1")
    assert config.build("forwarding")[1] == {"block_2": 1, "activity": 2}
    assert config.build("Dense").name == "d"


def test_all_complaints_come_at_once(load):
    message = complaint(load, "Trail.rate = 1\nTrial.rat = 2\nTrial.steps = %NONE")
    assert [f"run.gin:{line}:" in message for line in (1, 2, 3)] == [True] * 3


def test_the_same_binding_twice_in_a_file(load, write):
    message = complaint(load, "Trial.rate = 1.0\nA = 1\ndummies.Trial.rate = 2.0")
    assert message.startswith("run.gin:3: Trial.rate was already given at run.gin:1.")
    write("Trial.rate = 1.0", "other.gin")
    load("include 'other.gin'\nTrial.rate = 2.0\na/Trial.rate = 3.0", "Trial.rate = 4.0")
    assert config.build("Trial").values["rate"] == 4.0


# ------------------------------------------------------------------ types


@pytest.mark.parametrize(
    ("binding", "words"),
    [
        ("Trial.steps = '5'", "must be int | None, not '5'. Write 5 without quotation marks."),
        ("Trial.steps = 5.0", "must be int | None, not 5.0"),
        ("Trial.steps = True", "must be int | None, not True"),
        ("Trial.rate = False", "must be float, not False"),
        ("Trial.rate = None", "must be float, not None"),
        ("Trial.shape = (8, 'a')", "must be tuple[int, ...], not (8, 'a')"),
        ("Trial.shape = (8, True)", "not (8, True)"),
        ("Trial.shape = [8, 8]", "Write (8, 8)."),
        ("Trial.shape = (8)", "Write (8,)."),
        ("Trial.names = 'loss'", "Write ('loss',)."),
        ("Trial.mode = 'trian'", "Did you mean train?"),
        ("Trial.judge = @Lenient", "Write @Lenient() with parentheses."),
        ("Trial.judges = [@Lenient]", "Write [@Lenient()] with parentheses."),
        ("Trial.judge = @Mute()", "not @Mute()"),
        ("Trial.judge = 'Lenient'", "Judge"),
        ("Trial.schedule = @halving()", "Write @halving without parentheses."),
        ("Trial.schedule = @Mute()", "Write @Mute without parentheses."),
        ("Trial.kind = @Mute()", "Write @Mute without parentheses."),
        ("Trial.kind = @halving", "not @halving"),
        ("Trial.optimizer = @SGD", "Write @SGD() with parentheses."),
        ("Trial.optimizer = @Dense()", "not @Dense()"),
        ("Trial.steps = @halving()", "not @halving()"),
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


def test_a_macro_of_the_wrong_type_is_told_of_where_it_is_given(load, write):
    write("RATE = 1.0\nTrial.rate = %RATE", "other.gin")
    message = complaint(load, "include 'other.gin'\nRATE = %OTHER\nOTHER = 'fast'")
    assert message.startswith("run.gin:2: Trial.rate must be float, not 'fast'.")
    assert "It is %RATE, used at other.gin:2." in message


def test_a_macro_inside_a_value(load):
    message = complaint(load, "SIDE = 'a'\nTrial.shape = (8, %SIDE)")
    assert message.startswith("run.gin:2: Trial.shape must be tuple[int, ...], not (8, 'a')")


# ------------------------------------------------------------------ build


def test_a_refused_value_names_its_binding(load):
    load("Trial.steps = 3\nTrial.rate = -1.0")
    with pytest.raises(ConfigError) as caught:
        config.build("Trial")
    lines = str(caught.value).splitlines()
    assert lines[0] == "Trial cannot be built: rate is -1.0, below 0"
    assert lines[1] == "  run.gin:2: Trial.rate = -1.0"
    assert re.fullmatch(r"  raised in test_config.py:\d+", lines[2])
    assert len(lines) == 3
    assert type(caught.value.__cause__) is ValueError


def test_a_refused_value_deep_inside_names_the_inner_binding(load):
    load("Trial.tower = @Conv2D()\nConv2D.filters = -3\nConv2D.kernel_size = 3")
    message = complaint(config.build, "Trial")
    assert message.startswith("Conv2D cannot be built: ")
    assert "  run.gin:2: Conv2D.filters = -3" in message
    assert "run.gin:1" not in message


def test_our_own_errors_keep_their_type(load):
    load("Trial.rate = 101.0\nforwarding.momentum = @a/Trial()")
    with pytest.raises(DataError) as caught:
        config.build("forwarding")
    assert type(caught.value) is DataError
    assert str(caught.value) == ("rate is 101.0, a strange one\n  in call to Trial in scope a")


@pytest.mark.parametrize(
    ("text", "name", "wanted"),
    [
        ("", "tower", ["tower.filters"]),
        ("Trial.tower = @wide/tower()", "Trial", ["wide/tower.filters"]),
        ("demanding.of = 1", "demanding", ["demanding.amount"]),
        ("demanding.amount = 1", "demanding", ["demanding.of"]),
        ("", "Dense", ["Dense.units"]),
    ],
)
def test_a_missing_value(load, text, name, wanted):
    load(text)
    message = complaint(config.build, name)
    assert "needs a value for" in message
    assert message.splitlines()[1:] == [f"    {one} = …" for one in wanted]


def test_other_errors_stay_as_they_are(load):
    @gin.register(module="dummies")
    def crashing():
        raise KeyError("a bug")

    load()
    with pytest.raises(KeyError):
        config.build("crashing")


def test_what_builds_itself(load):
    load("tower.filters = @tower()")
    assert "one of its own parameters" in complaint(config.build, "tower")


# ------------------------------------------------------------------ used


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
        ("trian/pictures.size = 3", "called in scope test or scope train, not in trian. "
         "Did you mean train/pictures.size?"),
        ("tower.width = 3", "nothing calls tower. Does another binding refer to @tower()?"),
        ("train/test/pictures.size = 3", "not in train/test"),
        ("pictures.split = 'c'", "each call of pictures takes split from elsewhere"),
        ("tower.width = %WIDTH\nWIDTH = 3", "what refers to it (tower.width) is not used either"),
    ],
)  # fmt: skip
def test_unused(load, line, words):
    message = unused(USED + line, load)
    assert message.splitlines()[0].startswith("run.gin:8: ")
    assert words in message


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


def test_what_is_handed_over_uncalled_may_be_called_later(load):
    load("Trial.schedule = @late/halving\nhalving.every = %EVERY\nEVERY = 3\nb/halving.every = 1")
    config.build("Trial")
    message = complaint(config.check_all_used)
    assert message.startswith("run.gin:4: b/halving.every is never used")
    assert "EVERY =" not in message


def test_shipped_defaults_are_never_reported(load, monkeypatch, tmp_path):
    monkeypatch.setattr("ddl.config.usage.PACKAGE_FOLDER", str(tmp_path))
    load("FAR = 3")
    config.check_all_used()


# ------------------------------------------------------------------ macros read and set


def test_a_macro_set_by_the_program_stands_in_both_texts(load):
    load("SEED = None\nTrial.seed = %SEED")
    assert config.get("SEED") is None
    assert config.get("OTHER") is None
    config.set("SEED", 7)
    config.set("OTHER", (1, 2))
    assert config.get("SEED") == 7
    assert config.build("Trial").values["seed"] == 7
    config.check_all_used()
    for text in (config.config_text(), config.operative_config_text()):
        assert re.search(r"^SEED = 7$", text, re.MULTILINE)
        assert re.search(r"^OTHER = \(1, 2\)$", text, re.MULTILINE)
    with pytest.raises(ValueError, match="cannot be written"):
        config.set("SEED", object())


def test_reading_a_macro_uses_it(load):
    load("SEED = 3")
    assert config.get("SEED") == 3
    config.check_all_used()


# ------------------------------------------------------------------ saved texts


EVERYTHING = """
RATE = 1e-05
SHAPE = (8, 8, 1)
OPTIONAL = None
JUDGE = @Lenient()
Trial.rate = %RATE
Trial.shape = %SHAPE
Trial.steps = %OPTIONAL
Trial.judge = %JUDGE
Trial.schedule = @halving
Trial.names = ['a long text with many words, ' 'which is given in two pieces', "it's", 'ü\\n']
Trial.tower = {'zebra': -1, 'ant': [%RATE, {'deep': (True, None)}], 'long': 'x y ' 'z w ' 'v'}
Trial.optimizer = @SGD()
SGD.learning_rate = @CosineDecay()
CosineDecay.initial_learning_rate = %RATE
CosineDecay.decay_steps = 100
Trial.pictures = [@train/pictures(), @test/deep/pictures(), @Dense()]
Dense.units = 3
Dense.kernel_initializer = @GlorotUniform()
Dense.kernel_regularizer = @L2()
GlorotUniform.seed = 3
train/pictures.split = 'train'
test/pictures.split = 'test'
test/deep/pictures.size = 5
pictures.size = 4
"""


def summary(trial) -> list:
    optimizer, dense = trial.values["optimizer"], trial.values["pictures"][2]
    plain = {
        name: value
        for name, value in trial.values.items()
        if name not in ("self", "__class__", "judge", "optimizer", "pictures", "schedule")
    }
    # Keras numbers the names of what it builds: dense, dense_1…
    optimizer_config, dense_config = optimizer.get_config(), dense.get_config()
    del optimizer_config["name"], dense_config["name"]
    return [
        plain,
        list(trial.values["tower"]),
        type(trial.values["judge"]),
        trial.values["pictures"][:2],
        optimizer_config,
        dense_config,
    ]


def test_the_operative_text_repeats_the_run(load, write):
    load(EVERYTHING)
    first = summary(config.build("Trial"))
    text = config.operative_config_text()
    assert "test/deep/pictures.text = " in text  # a default
    config.load([write(text, "operative_config.gin")])
    second = summary(config.build("Trial"))
    config.check_all_used()
    assert second == first
    assert config.operative_config_text() == text


def test_the_config_text_repeats_the_run(load, write):
    load(EVERYTHING + "UNUSED = 3", "RATE = 2e-05")
    first = summary(config.build("Trial"))
    text = config.config_text()
    assert "RATE = 2e-05\n" in text
    assert "1e-05" not in text
    assert "UNUSED = 3" in text
    assert config.differences(text) == []
    config.load([write(text, "config.gin")])
    assert summary(config.build("Trial")) == first
    assert config.config_text() == text


def test_differences(load):
    load("GLOBAL = 64\nTrial.steps = %GLOBAL\nTrial.shape = (32, 64)\ntrain/pictures.size = 1")
    saved = config.config_text()
    load("GLOBAL = 128\nTrial.steps = %GLOBAL\nTrial.rate = 0.5\ntrain/pictures.size = 2")
    assert config.differences(saved) == [
        "GLOBAL: 64 → 128",
        "train/pictures.size: 1 → 2",
        "Trial.rate: 0.1 → 0.5",
        "Trial.shape: (32, 64) → ()",
    ]
    assert "GLOBAL" not in " ".join(config.differences(saved, ignore=["GLOBAL"]))


def test_differences_to_what_has_no_default(load):
    load("tower.filters = (32, 64)")
    saved = config.config_text()
    load("FAR = 3")
    assert config.differences(saved) == ["FAR: not set → 3", "tower.filters: (32, 64) → not set"]


def test_no_difference(load):
    load("RATE = 0.5\nTrial.rate = %RATE\nTrial.judge = @Lenient()\nTrial.steps = 1")
    saved = config.config_text()
    load(
        "# a comment\nTrial.seed = 0\na/Trial.rate = 0.5\n"
        "Trial.steps = 1\nTrial.judge = @dummies.Lenient()\ndummies.Trial.rate = 0.5"
    )
    assert config.differences(saved) == []
    assert config.differences(saved.replace("rate = %RATE", "rate = True")) == [
        "RATE: 0.5 → not set",
        "Trial.rate: True → 0.5",
        "a/Trial.rate: True → 0.5",
    ]


def test_comparing_disturbs_nothing(load):
    load("RATE = 0.5\nTrial.rate = %RATE")
    before = config.config_text(), config.operative_config_text()
    config.differences("RATE = 3\nimport nowhere\nNowhere.x = @Nothing()")
    assert (config.config_text(), config.operative_config_text()) == before
    assert config.build("Trial").values["rate"] == 0.5


# ------------------------------------------------------------------ registry


def test_registering_twice():
    registry.register_all()
    registry.register_all.cache_clear()
    registry.register_all()
    registry.register(halving, module="dummies")
    assert len(registry.matches("halving")) == 1


def test_register_leaves_the_item_alone(load):
    class Plain:
        def __init__(self, x=1):
            self.x = x

    registry.register(Plain, "PlainOne", module="dummies.plain")
    load("PlainOne.x = 2")
    assert config.build("PlainOne").x == 2
    assert type(config.build("PlainOne")) is Plain
    assert Plain().x == 1


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("SGD", ""),
        ("keras.optimizers.AdamW", ""),
        ("CosineDecay", "initial_learning_rate=0.1, decay_steps=3"),
        ("BinaryCrossentropy", "from_logits=True"),
        ("GlorotUniform", "seed=3"),
        ("L2", "l2=0.1"),
        ("MaxNorm", ""),
        ("scope/Dense", "units=3"),
    ],
)
def test_keras_objects_are_plain(load, name, arguments):
    scope = name.rpartition("/")[0]
    prefix = f"{scope}/" if scope else ""
    short = re.split(r"[/.]", name)[-1]
    load("\n".join(f"{prefix}{short}.{one}" for one in arguments.split(", ") if one))
    built = config.build(name)
    cls = registry.matches(short)[0].wrapped
    assert type(built) is cls
    direct = cls(**eval(f"dict({arguments})"))
    saved, expected = (keras.saving.serialize_keras_object(x) for x in (built, direct))
    for one in (saved, expected):
        one["config"].pop("name", None)
    assert saved == expected
    assert isinstance(keras.saving.deserialize_keras_object(saved), cls)


def test_a_model_of_configured_parts_is_saved_and_loaded(load, tmp_path):
    load("Dense.units = 2\nSGD.momentum = 0.5\nHuber.delta = 2.0")
    inputs = keras.Input((3,))
    model = keras.Model(inputs, config.build("Dense")(inputs))
    model.compile(optimizer=config.build("SGD"), loss=config.build("Huber"))
    model.save(tmp_path / "model.keras")
    restored = keras.saving.load_model(tmp_path / "model.keras")
    assert type(restored.optimizer) is keras.optimizers.SGD
    assert float(restored.optimizer.momentum) == 0.5
    features = np.ones((1, 3), "float32")
    np.testing.assert_array_equal(restored(features), model(features))


def test_importing_config_does_not_import_tensorflow():
    program = (
        "import sys, ddl.config; sys.exit('tensorflow' in sys.modules or 'keras' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
