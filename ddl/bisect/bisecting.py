"""The search for the first difference of two runs, in processes of their own."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ddl.bisect.configs import check_comparable, config_lines
from ddl.bisect.search import Side, search
from ddl.bisect.text import lines
from ddl.replay.devices import Placed, moves, placed
from ddl.replay.folder import Run, read_run, unchanged
from ddl.replay.processes import Process
from ddl.replay.replaying import temporary_folder


def bisect(
    paths: Sequence[Path],
    code: Sequence[Path | None],
    given: Sequence[str],
    chosen: Mapping[str, Any],
    *,
    verify: bool,
    report: Callable[[str], None],
) -> Iterator[str]:
    """Yields lines on the first difference of two runs.

    Args:
      paths: The directories of the runs.
      code: For each, the folder from which the user's modules are imported; None: as here.
      given: Flags of the command line for config and devices.
      chosen: The values of those on devices, by name.
      verify: As in `ddl.bisect.search.search`.
      report: Called with a line for each comparison.

    Raises:
      DdlError: If a run cannot be read, built or replayed, or the runs cannot be compared.
    """
    runs = [read_run(path) for path in paths]
    check_comparable(*runs)
    yield from config_lines(*runs)
    with temporary_folder() as folder, unchanged(paths), ExitStack() as stack:
        sides = []
        for name, run, own in zip("ab", runs, code, strict=True):
            flags = [f"--gin_file={run.config}", *given]
            devices = placed(run, run.reached, flags, chosen)
            yield from devices.notes
            yield from moves(run, chosen)
            sides.append(_side(run, devices, own, folder / name, stack))
        yield from lines(search(*sides, verify=verify, report=report))


def _side(run: Run, devices: Placed, code: Path | None, folder: Path, stack: ExitStack) -> Side:
    folder.mkdir()

    def started(name: str, flags: Sequence[str], in_detail: bool) -> Process:
        (own := folder / name).mkdir()
        return stack.enter_context(Process(run.path, flags, own, code=code, in_detail=in_detail))

    return Side(
        run,
        started("exact", devices.flags, False),
        lambda: started("detailed", devices.flags_in_detail, True),
    )
