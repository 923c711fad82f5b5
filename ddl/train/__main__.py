"""Another name of `python -m ddl.main`, as each command `ddl NAME` is `python -m ddl.NAME`."""

from ddl.cli.subcommands import start

if __name__ == "__main__":
    start("train")
