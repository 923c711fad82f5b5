"""Configs written, read back and compared."""

from ddl import config

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
        "train/pictures.size: 1 → 2",
        "Trial.rate: 0.1 → 0.5",
        "Trial.shape: (32, 64) → ()",
        "GLOBAL: 64 → 128",
    ]
    assert config.differences(saved, ignore=["Trial.steps", "Trial.rate", "pictures.size"]) == [
        "train/pictures.size: 1 → 2",
        "Trial.shape: (32, 64) → ()",
    ]


def test_what_may_differ_hides_no_other_use_of_a_macro(load):
    text = "STEPS = {}\nTrial.steps = %STEPS\nCosineDecay.decay_steps = %STEPS\nSGD.momentum = 0"
    load(text.format(3))
    saved = config.config_text()
    load(text.format(4))
    assert config.differences(saved, ignore=["Trial.steps"]) == ["STEPS: 3 → 4"]
    assert config.differences(saved) == ["STEPS: 3 → 4"]
    assert config.differences(saved, ["Trial.steps", "CosineDecay.decay_steps"]) == []


def test_differences_through_macros_of_macros_and_inside_values(load):
    text = "ONE = {}\nTWO = %ONE\nTrial.steps = %TWO\nTrial.shape = (8, %ONE)\nUNUSED = {}"
    load(text.format(1, 1))
    saved = config.config_text()
    load(text.format(2, 2))
    assert config.differences(saved) == ["Trial.shape: (8, 1) → (8, 2)", "TWO: 1 → 2"]


def test_differences_to_what_has_no_default(load):
    load("tower.filters = (32, 64)")
    saved = config.config_text()
    load("FAR = 3")
    assert config.differences(saved) == ["tower.filters: (32, 64) → not set"]


def test_no_difference(load):
    load("RATE = 0.5\nTrial.rate = %RATE\nTrial.judge = @Lenient()\nTrial.steps = 1")
    saved = config.config_text()
    load(
        "# a comment\nTrial.seed = 0\na/Trial.rate = 0.5\n"
        "Trial.steps = 1\nTrial.judge = @dummies.Lenient()\ndummies.Trial.rate = 0.5"
    )
    assert config.differences(saved) == []
    assert config.differences(saved.replace("rate = %RATE", "rate = True")) == [
        "Trial.rate: True → 0.5",
        "a/Trial.rate: True → 0.5",
    ]


def test_comparing_disturbs_nothing(load):
    load("RATE = 0.5\nTrial.rate = %RATE")
    before = config.config_text(), config.operative_config_text()
    config.differences("RATE = 3\nimport nowhere\nNowhere.x = @Nothing()")
    assert (config.config_text(), config.operative_config_text()) == before
    assert config.build("Trial").values["rate"] == 0.5
