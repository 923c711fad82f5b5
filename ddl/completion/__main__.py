"""Command that prints completions of `ddl` and `ddl-launch` for a shell.

  ddl completion bash > ~/.local/share/bash-completion/completions/ddl
  ddl completion zsh > ~/.zfunc/_ddl
  ddl completion fish > ~/.config/fish/completions/ddl.fish

The first line makes bash complete commands, flags, their values and files; ddl-launch completes
after `source` of the same file. zsh needs its folder in fpath before compinit. The script holds all
names, so a completion starts no Python and is immediate. Print it again after an update of ddl.

Exit status:
  0    Done.
  1    The shell is missing or unknown.
  70   Any other error: a bug, shown with its traceback, or a failure of the system.
  130  The command was interrupted.
"""

import sys
from collections.abc import Sequence

try:
    from absl import flags

    from ddl.cli.commands import exiting_on_errors, parse_flags_and_names
    from ddl.completion.words import words_of_all_commands
    from ddl.errors import did_you_mean, either
except KeyboardInterrupt:  # else Python prints a traceback
    sys.exit(130)

FLAGS = flags.FlagValues()

SHELLS = ("bash", "zsh", "fish")


def check_shell(names: Sequence[str]) -> str:
    """Returns the shell.

    Raises:
      flags.Error: If there is not one, or it is unknown.
    """
    if len(names) != 1:
        raise flags.Error(f"ddl completion takes one shell: {either(SHELLS)}.")
    if names[0] not in SHELLS:
        hint = did_you_mean(names[0], SHELLS)
        raise flags.Error(f"The shell must be {either(SHELLS)}, got {names[0]!r}.{hint}")
    return names[0]


def run(argv: Sequence[str] | None = None) -> None:
    """Runs the command, and exits with a status documented above.

    Args:
      argv: The program's name, then the arguments; None takes those of this process.
    """
    shell = parse_flags_and_names("ddl completion", __doc__, FLAGS, argv, check_shell)
    with exiting_on_errors():
        from ddl.completion import bash, fish, zsh

        script = {"bash": bash.script, "zsh": zsh.script, "fish": fish.script}[shell]
        print(script(words_of_all_commands()), end="")


if __name__ == "__main__":
    run()
