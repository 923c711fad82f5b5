"""The completions for zsh."""

from collections.abc import Sequence

from ddl.completion.words import POSITIONAL, TAKES_PATHS, CommandWords, Files, FlagWords

# What completes each kind of paths.
_PATHS: dict[Files, str] = {
    "config": '_files -g "*.gin(-.) *(-/)"',
    "folder": "_files -/",
    "file": "_files",
}

_SCRIPT = r"""#compdef ddl ddl-launch
# Completions of ddl for zsh, printed by: ddl completion zsh
_ddl() {
    local command=$words[2]
    if [[ ${words[1]:t} == ddl-launch ]]; then
        command=launch
    elif [[ $command == -* ]]; then
        command=train
    elif (( CURRENT == 2 )); then
        local -a commands=(
@COMMANDS@
        )
        _describe command commands
        return
    else
        shift words
        (( CURRENT-- ))
    fi
    local separator=${words[(i)--]}
    if [[ $command == launch ]] && (( separator < CURRENT )); then
        # After -- stand the flags of ddl train.
        command=train
        words=(ddl "${(@)words[separator+1,-1]}")
        (( CURRENT -= separator - 1 ))
    fi
    case $command in
@CASES@
    esac
}
if [[ ${funcstack[1]} == _ddl ]]; then
    _ddl "$@"
else
    compdef _ddl ddl ddl-launch
fi
"""


def script(commands: Sequence[CommandWords]) -> str:
    """Returns the script for zsh.

    Args:
      commands: The words of all subcommands.
    """
    described = [f"            {_quoted(f'{one.name}:{one.purpose}')}" for one in commands]
    cases = []
    for command in commands:
        specifications = [_specification(flag) for flag in command.flags]
        specifications.append("--help[Show the flags]")
        if words := POSITIONAL.get(command.name):
            specifications.append(f"*:name:({' '.join(words)})")
        if files := TAKES_PATHS.get(command.name):
            specifications.append(f"*:{'config or ' * (files == 'config')}run:{_PATHS[files]}")
        lines = " \\\n                ".join(map(_quoted, specifications))
        cases.append(f"        {command.name})\n            _arguments {lines} ;;")
    return _SCRIPT.replace("@COMMANDS@", "\n".join(described)).replace("@CASES@", "\n".join(cases))


def _specification(flag: FlagWords) -> str:
    """Returns the argument of `_arguments` for a flag."""
    text = flag.help
    for character in "\\[]:":
        text = text.replace(character, f"\\{character}")
    if not flag.takes_value:
        return f"{flag.name}[{text}]"
    value = _PATHS.get(flag.files, f"({' '.join(flag.values)})" if flag.values else " ")
    return f"*{flag.name}=[{text}]:value:{value}"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
