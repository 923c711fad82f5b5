"""The pages of the documents, their code blocks, and the names in them."""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "BUILD.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]


class Block(NamedTuple):
    """A code block.

    Attributes:
      page: Where it stands.
      language: Of the block, such as `sh`; empty for none.
      text: Its lines.
    """

    page: Path
    language: str
    text: str


def blocks(page: Path) -> list[Block]:
    """Returns the code blocks of a page, in order."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    return [Block(page, language, text) for language, text in found]


def prose(page: Path) -> str:
    """Returns a page without its code blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def spans(page: Path) -> list[str]:
    """Returns what stands in backticks outside of code blocks."""
    return re.findall(r"`([^`\n]+)`", prose(page))


def all_code() -> list[tuple[Path, str]]:
    """Returns each code block and each text in backticks, with its page."""
    found = [(page, span) for page in PAGES for span in spans(page)]
    return found + [(page, block.text) for page in PAGES for block in blocks(page)]


def files() -> dict[str, str]:
    """Returns the code blocks that begin with the name of their file: text by name."""
    found = {}
    for page in PAGES:
        for block in blocks(page):
            if name := re.match(r"# ([\w.]+\.(?:py|gin))\n", block.text):
                assert name[1] not in found, f"{name[1]} stands on two pages"
                found[name[1]] = block.text
    return found


def commands() -> dict[str, Path]:
    """Returns each command of the `sh` blocks once, with the first page that has it."""
    found: dict[str, Path] = {}
    for page in PAGES:
        for block in blocks(page):
            if block.language == "sh":
                for line in block.text.replace("\\\n", " ").splitlines():
                    if command := re.sub(r"\s+# .*", "", line).strip():
                        found.setdefault(command, page)
    return found
