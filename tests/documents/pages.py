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
    """A code block: its page, its language, such as `sh`, and its lines."""

    page: Path
    language: str
    text: str


def blocks(page: Path) -> list[Block]:
    """Returns the code blocks of a page, in order."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    return [Block(page, language, text) for language, text in found]


ALL_BLOCKS = [block for page in PAGES for block in blocks(page)]


def prose(page: Path) -> str:
    """Returns a page without its code blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def all_code() -> list[tuple[Path, str]]:
    """Returns each code block and each text in backticks, with its page."""
    spans = [(page, span) for page in PAGES for span in re.findall(r"`([^`\n]+)`", prose(page))]
    return spans + [(block.page, block.text) for block in ALL_BLOCKS]


def files() -> dict[str, str]:
    """Returns the code blocks that begin with the name of their file: text by name."""
    found: dict[str, str] = {}
    for block in ALL_BLOCKS:
        if name := re.match(r"# ([\w.]+\.(?:py|gin))\n", block.text):
            assert name[1] not in found, f"{name[1]} stands on two pages"
            found[name[1]] = block.text
    return found


def commands() -> list[str]:
    """Returns each command of the `sh` blocks once."""
    shown = [block.text.replace("\\\n", " ") for block in ALL_BLOCKS if block.language == "sh"]
    lines = [re.sub(r"\s+# .*", "", line).strip() for text in shown for line in text.splitlines()]
    return list(dict.fromkeys(filter(None, lines)))
