"""The completions for bash, from version 3.2 of macOS on."""

from collections.abc import Sequence

from ddl.completion.words import POSITIONAL, TAKES_PATHS, CommandWords

_SCRIPT = r"""# Completions of ddl for bash, printed by: ddl completion bash
_ddl_files() {
    local IFS=$'\n'
    compopt -o filenames 2>/dev/null
    case "$1" in
        @config) COMPREPLY=($(compgen -f -X '!*.gin' -- "$2"; compgen -d -- "$2")) ;;
        @folder) COMPREPLY=($(compgen -d -- "$2")) ;;
        @file) COMPREPLY=($(compgen -f -- "$2")) ;;
    esac
}
_ddl() {
    local current="${COMP_WORDS[COMP_CWORD]}" previous="" command="" flag="" value="" prefix=""
    local index words=""
    (( COMP_CWORD > 0 )) && previous="${COMP_WORDS[COMP_CWORD-1]}"
    COMPREPLY=()
    # bash splits --flag=value at the =, unless COMP_WORDBREAKS was changed.
    if [[ $current == "=" ]]; then
        flag=$previous
    elif [[ $previous == "=" ]]; then
        flag=${COMP_WORDS[COMP_CWORD-2]} value=$current
    elif [[ $current == --*=* ]]; then
        flag=${current%%=*} value=${current#*=} prefix="$flag="
    elif [[ $previous == --?* && $current != -* ]]; then
        flag=$previous value=$current
    fi
    if [[ ${COMP_WORDS[0]##*/} == ddl-launch ]]; then
        command=launch
    elif (( COMP_CWORD > 1 )); then
        command=${COMP_WORDS[1]}
        [[ $command == -* ]] && command=train
    elif [[ $current == -* ]]; then
        command=train
    fi
    if [[ $command == launch ]]; then
        for (( index = 1; index < COMP_CWORD; index++ )); do
            [[ ${COMP_WORDS[index]} == -- ]] && command=train
        done
    fi
    local IFS=$'\n'
    if [[ -n $flag ]]; then
        case "$command $flag" in
@VALUES@
            *) flag="" ;;
        esac
        if [[ $words == @* ]]; then
            _ddl_files "$words" "$value"
        elif [[ -n $words ]]; then
            COMPREPLY=($(compgen -P "$prefix" -W "${words// /$IFS}" -- "$value"))
        fi
        [[ -n $flag ]] && return
    fi
    case "$command" in
        "") words='@COMMANDS@' ;;
@WORDS@
    esac
    if [[ -n $command && $current != -* ]]; then
        case "$command" in
@POSITIONAL@
            *) words="" ;;
        esac
    fi
    if [[ $words == @* ]]; then
        _ddl_files "$words" "$current"
    else
        COMPREPLY=($(compgen -W "${words// /$IFS}" -- "$current"))
        [[ ${COMPREPLY[0]} == *= ]] && compopt -o nospace 2>/dev/null
    fi
}
complete -F _ddl ddl ddl-launch
"""


def script(commands: Sequence[CommandWords]) -> str:
    """Returns the script for bash.

    Args:
      commands: The words of all subcommands.
    """
    values, words = [], []
    for command in commands:
        names = []
        for flag in command.flags:
            names.append(f"{flag.name}=" if flag.takes_value else flag.name)
            if flag.takes_value:
                text = " ".join(flag.values) if flag.files == "none" else f"@{flag.files}"
                values.append(f"            '{command.name} {flag.name}') words='{text}' ;;")
        words.append(f"        {command.name}) words='{' '.join([*names, '--help'])}' ;;")
    positional = [f"            {name}) words='{' '.join(w)}' ;;" for name, w in POSITIONAL.items()]
    positional += [
        f"            {name}) words='@{files}' ;;" for name, files in TAKES_PATHS.items()
    ]
    return (
        _SCRIPT.replace("@VALUES@", "\n".join(values))
        .replace("@COMMANDS@", " ".join(command.name for command in commands))
        .replace("@WORDS@", "\n".join(words))
        .replace("@POSITIONAL@", "\n".join(positional))
    )
