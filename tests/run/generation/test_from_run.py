"""Text drawn from the model of a run, and the flags of `ddl.generate`."""

import pytest

from ddl import config
from ddl.distribution.communication import Communication
from ddl.errors import ConfigError, DataError
from ddl.generate import __main__ as command
from ddl.run import train
from ddl.run.from_checkpoints import SavedWeights
from ddl.run.generation.from_run import Draws, generate_from_run, read_prompt, show
from ddl.run.generation.text_codec import TextCodec
from tests.conftest import make_strategy
from tests.run.test_train import CONFIGS, run

TINY = (
    *("gpt.width = 8", "gpt.heads = 2", "gpt.blocks = 1", "LENGTH = 8", "TRAIN_STEPS = 3"),
    *("WARMUP_STEPS = 1", "EVAL_EVERY = None", "LEARNING_RATE = 0.1"),
    *("Trainer.weight_average = @ExponentialMovingAverage()", "gpt.vocabulary = %VOCABULARY"),
)
PLAY = {"gin_file": "play_gpt.gin"}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("play") / "run"
    run(folder, *TINY, "VOCABULARY = 256", "CHECKPOINT_EVERY = 1", **PLAY)
    return folder


def drawn(model_dir, prompt, *params, **arguments):
    if not any("VOCABULARY" in param for param in params):
        params = ("VOCABULARY = 256", *params)
    config.load([str(CONFIGS / "play_gpt.gin")], [*TINY, *params])
    placement = train.Placement(make_strategy("one_device", 1), Communication())
    given = {"draws": Draws(12, 0.8, seed=5), **arguments}
    return generate_from_run(placement, str(model_dir), prompt, **given)


def test_the_same_command_draws_the_same_text(model_dir, capsys):
    (first,) = drawn(model_dir, "Ros")
    error = capsys.readouterr()
    assert "Restored step 3 from" in error.err
    assert not error.out
    assert first.startswith("Ros")
    two = drawn(model_dir, "longer than 8 positions", samples=2)
    assert (
        "The prompt has 23 tokens, of which the model sees the last 8." in capsys.readouterr().err
    )
    assert two[0] != two[1]
    assert drawn(model_dir, "Ros") == [first]
    # The tokens are those that `generate` draws with the averages of the checkpoint.
    (tokens,) = drawn(model_dir, [82, 111, 115], draws=Draws(4, 0.0))
    (own,) = drawn(
        model_dir, [82, 111, 115], draws=Draws(9, 1.0), weights=SavedWeights(1, averaged=False)
    )
    assert tokens.startswith("82,111,115,")
    assert len(own.split(",")) == 12


def test_what_is_refused(model_dir):
    with pytest.raises(DataError, match="from 0 to 255, the vocabulary of .* got 1 to 256"):
        drawn(model_dir, [1, 256])


def test_prompts(tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_bytes("Zoë\r\n".encode())
    assert read_prompt(None, str(file)) == "Zoë\r\n"
    file.write_bytes(b"\xff")
    for name in ("prompt.txt", "missing.txt"):
        with pytest.raises(DataError, match=f"{name} cannot be read as UTF-8 text: .* Pass anot"):
            read_prompt(None, str(tmp_path / name))
    with pytest.raises(DataError, match="The prompt is empty"):
        read_prompt("", None)


def test_texts_and_tokens():
    codec = TextCodec()
    tokens = codec.tokens("Zoë\udcff", 256)  # the last byte of an argument was no UTF-8
    assert tokens == [*"Zoë".encode(), 255]
    assert codec.text([*tokens[:4], 0xC3]) == "Zoë"  # the end cuts a character off
    assert codec.text([90, 255, 90]) == "Z\ufffdZ"
    with pytest.raises(ConfigError, match="has 256 tokens, got 65 tokens. Bind TextCodec"):
        codec.tokens("x", 65)
    letters = "abc"
    own = TextCodec(
        lambda text: [letters.index(one) for one in text],
        lambda tokens: "".join(letters[token] for token in tokens),
    )
    assert own.text(own.tokens("cab", 3)) == "cab"
    with pytest.raises(ConfigError, match="got only encode. Bind TextCodec.decode, too"):
        TextCodec(encode=own.encode)
    with pytest.raises(ConfigError, match="TextCodec.decode must be a function of"):
        TextCodec(own.encode, lambda: "")


def test_a_terminal_gets_no_control_characters(capsys, monkeypatch):
    show(["a\x1b[2Jb", "c"])
    assert capsys.readouterr().out == f"a\x1b[2Jb\n{'-' * 40}\nc\n"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    show(["a\x1b[2Jb"])
    assert capsys.readouterr().out == "a\\x1b[2Jb\n"


PLAY_FLAGS = ["--gin_file=configs/play_gpt.gin", "--model_dir=x"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (PLAY_FLAGS[:1], "--model_dir is required"),
        (
            PLAY_FLAGS,
            "of --prompt, --prompt_file and --prompt_tokens is required, got none",
        ),
        ([*PLAY_FLAGS, "--prompt=a", "--prompt_file=b"], "got --prompt and --prompt_file"),
        ([*PLAY_FLAGS, "--prompt_tokens=1,b"], "must be numbers such as 5,0,17, got '1,b'"),
        ([*PLAY_FLAGS, "--prompt=a", "--length=0"], "length"),
        ([*PLAY_FLAGS, "--prompt=a", "--temperature=-1"], "temperature"),
    ],
)
def test_wrong_flags(flags, message, capsys):
    try:
        with pytest.raises(SystemExit) as ended:
            command.run(["command", *flags])
    finally:
        for name in command.FLAGS:
            command.FLAGS[name].unparse()
    assert ended.value.code == 1
    assert message in capsys.readouterr().err
