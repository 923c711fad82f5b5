"""Starts and supervises a local cluster. Not supported yet in this version.

python -m ddl.launch --num_workers=N [--num_ps=M] [--max_restarts=K] -- <ddl.main flags>
"""

import sys


def run() -> None:
    """The command `ddl-launch`: says that it is not there yet, and exits with 1."""
    if any(argument in ("--help", "-h") for argument in sys.argv[1:]):
        print(__doc__)
        sys.exit(0)
    print(
        "ddl-launch: several processes are not supported yet in this version of ddl. Several "
        "devices of one machine are: ddl --strategy=mirrored …",
        file=sys.stderr,
    )
    sys.exit(1)


if __name__ == "__main__":
    run()
