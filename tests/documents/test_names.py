"""Every link, path, flag and name in the documents exists, and the pages stay short."""

import importlib
import inspect
import re
from functools import cache
from pathlib import Path

import pytest

import benchmarks
from ddl.cli.flags import config_flags, launch_flags, main_flags
from ddl.config import registry
from tests.documents.pages import PAGES, ROOT, all_code, files, prose

# Flags and variables of other programs.
FLAGS_OF_OTHERS = {"--distribution", "--gpus-per-task", "--logdir"}
# Flags of the benchmarks and of the GPU suite, and where they are defined.
DEFINED_IN = {
    "--only": "benchmarks/command.py",
    "--on_cpu": "tests/gpu/suite.py",
    "--small": "tests/gpu/suite.py",
}
VARIABLES_OF_OTHERS = {
    *("TF_CONFIG", "TF_ENABLE_ONEDNN_OPTS", "TPU_NAME", "NO_COLOR", "GLIBC_TUNABLES"),
    *("TF_MKL_OPTIMIZE_PRIMITIVE_MEMUSE", "MALLOC_ARENA_MAX"),
}


def test_readme_and_build_are_short():
    assert len((ROOT / "README.md").read_text().split()) < 900
    assert len((ROOT / "BUILD.md").read_text().splitlines()) <= 150


def anchors(page: Path) -> set[str]:
    """Returns the anchors of the headings, as GitHub makes them."""
    headings = re.findall(
        r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.S), re.M
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "benchmarks" / "README.md"], ids=str)
def test_links(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        linked = (page.parent / file).resolve() if file else page
        assert linked.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(linked), f"{page.name} links to {target}"


def test_every_page_is_linked_from_the_readme():
    for page in (ROOT / "docs").glob("*.md"):
        if page.name != "README.md":
            assert f"(docs/{page.name})" in (ROOT / "README.md").read_text()
            assert f"({page.name})" in (ROOT / "docs" / "README.md").read_text()


def test_paths():
    pattern = r"(?<![\w/.-])(?:configs|tests|ddl|benchmarks|docs|\.ci)/[\w./]*"
    for page, code in all_code():
        if page.name == "BUILD.md" or "/" in code:
            for path in re.findall(pattern, code):
                assert (ROOT / path).exists(), f"{page.name} names {path}"


def resolved(name: str) -> bool:
    """Returns whether a dotted name is a module, an attribute of one, or an argument of a class."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[length:]:
            if inspect.isclass(found) and attribute in inspect.signature(found).parameters:
                return attribute == parts[-1]
            if not hasattr(found, attribute):
                return False
            found = getattr(found, attribute)
        return True
    return False


def test_dotted_names():
    for page, code in all_code():
        for name in re.findall(r"(?<![\w/.@-])(?:ddl|keras|benchmarks)(?:\.[A-Za-z]\w*)+", code):
            if not name.endswith(".py"):
                assert resolved(name), f"{page.name} names {name}"


def test_modules_that_commands_start():
    for page, code in all_code():
        for module in re.findall(r"python -m ([\w.]+)", code):
            assert resolved(module), f"{page.name} names {module}"
        for name in re.findall(r"python -m benchmarks (\w+)", code):
            assert name in {*benchmarks.BENCHMARKS, *benchmarks.LONG, *benchmarks.ON_GPU}, (
                f"{page.name} names {name}"
            )
        for target in re.findall(r"(?<![\w/])make ([a-z-]+)", code):
            makefile = (ROOT / "Makefile").read_text()
            assert re.search(rf"^{target}:", makefile, re.M), f"{page.name} names make {target}"


@cache
def own_flags() -> set[str]:
    """Returns all flags of the commands, as --help lists them."""
    found = {"--help", "--version", "--gin.NAME", "--"}
    for values in (main_flags(), launch_flags(), config_flags()):
        text = values.get_help(include_special_flags=False)
        for negative, name in re.findall(r"^ *(?:-\w,)?--(\[no\])?(\w+):", text, re.M):
            found |= {f"--{name}"} | ({f"--no{name}"} if negative else set())
    return found


def test_flags():
    assert len(own_flags()) > 25
    for page, code in all_code():
        for flag in re.findall(r"(?<![\w-])--[A-Za-z][\w.-]*", code):
            known = own_flags() | FLAGS_OF_OTHERS | DEFINED_IN.keys()
            assert flag in known, f"{page.name} names {flag}"
    for flag, file in DEFINED_IN.items():
        assert f'add_argument("{flag}"' in (ROOT / file).read_text(), f"{file} defines no {flag}"


def test_every_flag_is_documented():
    pages = "".join(page.read_text() for page in PAGES)
    for flag in own_flags():
        name = flag.removeprefix("--no") if flag.startswith("--no") else flag
        assert name.removeprefix("--") in pages, f"{flag} is on no page"


def macros() -> set[str]:
    """Returns the macros that standard.gin and the configs bind."""
    texts = [ROOT / "ddl" / "standard.gin", *(ROOT / "configs").glob("*.gin")]
    return {
        name for text in texts for name in re.findall(r"^([A-Z][A-Z_]+) = ", text.read_text(), re.M)
    }


def test_macros():
    for page, code in all_code():
        for name in re.findall(r"(?<![\w.])[A-Z][A-Z0-9]*_[A-Z0-9_]+(?![\w.])", code):
            known = name in macros() | VARIABLES_OF_OTHERS or name.startswith("HOROVOD_")
            assert known, f"{page.name} names {name}"


def test_every_standard_macro_is_documented():
    page = (ROOT / "docs" / "configs.md").read_text()
    standard = (ROOT / "ddl" / "standard.gin").read_text()
    for name in re.findall(r"^([A-Z_]+) = ", standard, re.M):
        assert f"`{name}`" in page, f"docs/configs.md does not explain {name}"


@cache
def registered(name: str):
    """Returns what a name in a config means; None if nothing, or a user's own."""
    if name.startswith("keras_hub."):
        importlib.import_module("keras_hub")
    registry.register_all()
    found = [item.wrapped for item in registry.matches(name)]
    known = ("ddl", "keras", "keras_hub")
    of_ddl = [item for item in found if item.__module__.partition(".")[0] in known]
    return of_ddl[0] if len(of_ddl) == 1 else None


def test_names_in_configs():
    own = "".join(files().values())
    for page, code in all_code():
        for name in re.findall(r"@(?:[\w]+/)?([\w.]+)\(\)", code):
            users = re.search(rf"(def|class) {name}\b", own)
            assert users or registered(name) is not None, f"{page.name} names @{name}()"
        for name, parameter in re.findall(r"(?<![\w./@])([A-Za-z]\w+)\.([a-z]\w*)\b", code):
            item = registered(name)
            if item is None or parameter in ("py", "gin", "md"):
                continue
            known = parameter in inspect.signature(item).parameters or hasattr(item, parameter)
            assert known, f"{page.name} names {name}.{parameter}"
