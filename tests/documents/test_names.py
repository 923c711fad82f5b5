"""Every link, path, flag and name in the documents exists, and the pages stay short."""

import inspect
import operator
import pydoc
import re
from functools import cache
from pathlib import Path

import pytest
import tensorflow as tf

from ddl.cli.flags import config_flags, launch_flags, main_flags
from ddl.config import registry
from tests.documents.pages import PAGES, ROOT, all_code, files, prose

# Flags and variables of other programs.
FLAGS_OF_OTHERS = {"distribution", "gpus-per-task", "logdir"}
VARIABLES_OF_OTHERS = {
    *("TF_CONFIG", "TF_ENABLE_ONEDNN_OPTS", "TPU_NAME", "MALLOC_ARENA_MAX"),
    *("HOROVOD_STALL_CHECK_TIME_SECONDS", "HOROVOD_TIMELINE"),
}
STANDARD = (ROOT / "ddl" / "standard.gin").read_text()


def test_pages_are_short_and_in_the_index():
    assert len((ROOT / "README.md").read_text().split()) <= 700
    assert len((ROOT / "BUILD.md").read_text().splitlines()) <= 80
    assert sum(len(page.read_text().split()) for page in PAGES) <= 18_000
    pages, index = list((ROOT / "docs").glob("*.md")), (ROOT / "docs" / "README.md").read_text()
    assert len(pages) == 15
    assert all(page.name == "README.md" or f"({page.name})" in index for page in pages)


def anchors(page: Path) -> set[str]:
    """Returns the anchors of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", prose(page).lower(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "benchmarks" / "README.md"], ids=str)
def test_links(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        linked = (page.parent / file).resolve() if file else page
        assert linked.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(linked), f"{page.name} links to {target}"


def check_names(pattern, is_there):
    """Raises AssertionError unless all names of the pages' code that a pattern finds are there."""
    missing = {
        (page.name, name)
        for page, code in all_code()
        for name in re.findall(pattern, code)
        if not is_there(name)
    }
    assert not missing


def test_paths():
    pattern = r"(?<![\w/.-])(?:configs|tests|ddl|benchmarks|docs|examples)/[\w./]*"
    check_names(pattern, lambda path: (ROOT / path).exists())
    build = (ROOT / "BUILD.md").read_text()
    for name, file in re.findall(r"`(?:\w+\.)*(\w+)` in `(ddl/[\w/]+\.py)`", build):
        assert re.search(rf"(?:def|class) {name}\b", (ROOT / file).read_text()), (name, file)


def resolved(name: str) -> bool:
    """Returns whether a dotted name is a module, an attribute of one, or an argument of a class."""
    home, _, argument = name.rpartition(".")
    found = pydoc.locate(home)
    is_argument = inspect.isclass(found) and argument in inspect.signature(found).parameters
    return name.endswith(".py") or is_argument or pydoc.locate(name) is not None


def test_dotted_names():
    check_names(r"(?<![\w/.@-])(?:ddl|keras)(?:\.[A-Za-z]\w*)+", resolved)
    get = operator.attrgetter  # raises AttributeError
    check_names(r"(?<![\w.])tf\.([A-Za-z][\w.]*\w)", lambda name: [get(name)(tf)])


def test_benchmarks_and_targets_of_make():
    makefile = (ROOT / "Makefile").read_text()
    check_names(
        r"python -m benchmarks ([a-z_ ]+)",
        lambda names: all((ROOT / f"benchmarks/{name}.py").exists() for name in names.split()),
    )
    check_names(r"(?<![\w/])make ([a-z-]+)", lambda name: f"\n{name}:" in makefile)


def test_flags():
    """Pages name flags that exist, and each flag is on a page."""
    known = {"help", "gin.NAME", ""}
    for values in (main_flags(), launch_flags(), config_flags()):
        known |= {flag.name for flag in values.get_key_flags_for_module("ddl.cli.flags")}
    pattern = r"(?<![\w-])--([A-Za-z][\w.-]*)"
    check_names(pattern, lambda flag: flag in known | FLAGS_OF_OTHERS)
    assert known - set(re.findall(pattern, "\n".join(code for _, code in all_code()))) == {""}


def test_macros():
    """Pages name macros that exist, and each macro of standard.gin is on a page."""
    texts = [STANDARD, *(path.read_text() for path in (ROOT / "configs").glob("*.gin"))]
    macros = set(re.findall(r"^([A-Z][A-Z_]+) = ", "\n".join(texts), re.M)) | VARIABLES_OF_OTHERS
    check_names(r"(?<![\w.])[A-Z][A-Z0-9]*_[A-Z0-9_]+(?![\w.])", macros.__contains__)
    for name in re.findall(r"^([A-Z_]+) = ", STANDARD, re.M):
        assert f"`{name}`" in (ROOT / "docs" / "configs.md").read_text(), f"{name} is on no page"


@cache
def registered(name: str):
    """Returns what a name in a config means; None if nothing, or a user's own."""
    registry.register()
    found = [item.wrapped for item in registry.matches(name)]
    known = [item for item in found if item.__module__.partition(".")[0] in ("ddl", "keras")]
    return known[0] if len(known) == 1 else None


def has_parameter(names: tuple[str, str]) -> bool:
    """Returns whether a parameter is one of what a name in a config means, or is none."""
    name, parameter = names
    item = registered(name)
    if item is None or parameter in ("py", "gin", "md"):
        return True
    return parameter in inspect.signature(item).parameters or hasattr(item, parameter)


def test_names_in_configs():
    own = set(re.findall(r"(?:def|class) (\w+)", "".join(files().values())))
    check_names(r"@(?:[\w]+/)?([\w.]+)\(\)", lambda name: name in own or registered(name))
    check_names(r"(?<![\w./@])([A-Za-z]\w+)\.([a-z]\w*)\b", has_parameter)
