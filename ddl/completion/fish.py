"""The completions for fish."""

from collections.abc import Iterator, Sequence

from ddl.completion.words import POSITIONAL, TAKES_PATHS, CommandWords, Files, FlagWords

# What completes each kind of paths. Any file is completed by fish itself, with --force-files.
_PATHS: dict[Files, str] = {
    "config": "(__fish_complete_suffix .gin)",
    "folder": "(__fish_complete_directories)",
}


def script(commands: Sequence[CommandWords]) -> str:
    """Returns the script for fish.

    Args:
      commands: The words of all subcommands.
    """
    lines = ["# Completions of ddl for fish, printed by: ddl completion fish", "complete -c ddl -f"]
    for command in commands:
        lines.append(
            f"complete -c ddl -n __fish_use_subcommand -a {command.name} "
            f"-d {_quoted(command.purpose)}"
        )
    for command in commands:
        condition = f"__fish_seen_subcommand_from {command.name}"
        if command.name == "train":  # without a subcommand, flags are those of train
            condition = f"__fish_use_subcommand; or {condition}"
        begins = f"complete -c ddl -n {_quoted(condition)}"
        lines += [f"{begins} {each}" for each in _flags(command.flags)]
        if words := POSITIONAL.get(command.name):
            lines.append(f"{begins} -a {_quoted(' '.join(words))}")
        if files := TAKES_PATHS.get(command.name):
            lines.append(f"{begins} -a {_quoted(_PATHS[files])}")
        if command.name == "launch":
            lines.append("complete -c ddl-launch -f")
            lines += [f"complete -c ddl-launch {each}" for each in _flags(command.flags)]
    # After --, fish takes no word for an option, so the flags of ddl train are arguments there.
    train = next(command for command in commands if command.name == "train")
    typed = [f"{flag.name}={value}" for flag in train.flags for value in flag.values]
    typed += [
        f"{flag.name}=" if flag.takes_value else flag.name
        for flag in train.flags
        if not flag.values
    ]
    for program in ("ddl", "ddl-launch"):
        condition = "contains -- -- (commandline -opc)"
        lines.append(f"complete -c {program} -n {_quoted(condition)} -a {_quoted(' '.join(typed))}")
    return "\n".join(lines) + "\n"


def _flags(flags: Sequence[FlagWords]) -> Iterator[str]:
    """Yields the arguments of `complete` for each flag."""
    for flag in flags:
        text = f"-l {flag.name.removeprefix('--')} -d {_quoted(flag.help)}"
        if flag.files == "file":
            text += " -r -F"
        elif flag.takes_value:
            completed = _PATHS.get(flag.files, " ".join(flag.values))
            text += f" -x -a {_quoted(completed)}"
        yield text


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
