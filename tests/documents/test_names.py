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
    *("TF_CONFIG", "TF_ENABLE_ONEDNN_OPTS", "TPU_NAME", "GLIBC_TUNABLES", "MALLOC_ARENA_MAX"),
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


def test_paths():
    pattern = r"(?<![\w/.-])(?:configs|tests|ddl|benchmarks|docs|examples)/[\w./]*"
    for page, code in all_code():
        for path in re.findall(pattern, code):
            assert (ROOT / path).exists(), f"{page.name} names {path}"


def resolved(name: str) -> bool:
    """Returns whether a dotted name is a module, an attribute of one, or an argument of a class."""
    home, _, argument = name.rpartition(".")
    found = pydoc.locate(home)
    is_argument = inspect.isclass(found) and argument in inspect.signature(found).parameters
    return is_argument or pydoc.locate(name) is not None


def test_dotted_names():
    for page, code in all_code():
        for name in re.findall(r"(?<![\w/.@-])(?:ddl|keras)(?:\.[A-Za-z]\w*)+", code):
            assert name.endswith(".py") or resolved(name), f"{page.name} names {name}"
        for name in re.findall(r"(?<![\w.])tf\.([A-Za-z][\w.]*\w)", code):
            operator.attrgetter(name)(tf)  # raises AttributeError


def test_benchmarks_and_targets_of_make():
    makefile = (ROOT / "Makefile").read_text()
    for page, code in all_code():
        for names in re.findall(r"python -m benchmarks ([a-z_ ]+)", code):
            for name in names.split():
                assert (ROOT / f"benchmarks/{name}.py").exists(), f"{page.name} names {name}"
        for target in re.findall(r"(?<![\w/])make ([a-z-]+)", code):
            assert re.search(rf"^{target}:", makefile, re.M), f"{page.name} names make {target}"


def test_flags():
    """Pages name flags that exist, and each flag is on a page."""
    known = {"help", "gin.NAME", ""}
    for values in (main_flags(), launch_flags(), config_flags()):
        known |= {flag.name for flag in values.get_key_flags_for_module("ddl.cli.flags")}
    assert len(known) > 20
    named = {}
    for page, code in all_code():
        for flag in re.findall(r"(?<![\w-])--([A-Za-z][\w.-]*)", code):
            assert flag in known | FLAGS_OF_OTHERS, f"{page.name} names --{flag}"
            named[flag] = page
    assert known - named.keys() <= {""}


def test_macros_of_standard_gin_are_documented():
    for name in re.findall(r"^([A-Z_]+) = ", STANDARD, re.M):
        assert f"`{name}`" in (ROOT / "docs" / "configs.md").read_text(), f"{name} is on no page"


def test_macros():
    texts = [STANDARD, *(path.read_text() for path in (ROOT / "configs").glob("*.gin"))]
    macros = set(re.findall(r"^([A-Z][A-Z_]+) = ", "\n".join(texts), re.M)) | VARIABLES_OF_OTHERS
    for page, code in all_code():
        for name in re.findall(r"(?<![\w.])[A-Z][A-Z0-9]*_[A-Z0-9_]+(?![\w.])", code):
            assert name in macros, f"{page.name} names {name}"


@cache
def registered(name: str):
    """Returns what a name in a config means; None if nothing, or a user's own."""
    registry.register_all()
    found = [item.wrapped for item in registry.matches(name)]
    known = [item for item in found if item.__module__.partition(".")[0] in ("ddl", "keras")]
    return known[0] if len(known) == 1 else None


def test_names_in_configs():
    own = "".join(files().values())
    for page, code in all_code():
        for name in re.findall(r"@(?:[\w]+/)?([\w.]+)\(\)", code):
            users = re.search(rf"(def|class) {name}\b", own)
            assert users or registered(name) is not None, f"{page.name} names @{name}()"
        for name, parameter in re.findall(r"(?<![\w./@])([A-Za-z]\w+)\.([a-z]\w*)\b", code):
            item = registered(name)
            if item is not None and parameter not in ("py", "gin", "md"):
                known = parameter in inspect.signature(item).parameters or hasattr(item, parameter)
                assert known, f"{page.name} names {name}.{parameter}"
