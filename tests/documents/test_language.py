"""The language of documents and docstrings: how sentences begin, banned phrases, their length."""

import inspect
import math
import re
from collections.abc import Iterator

import pytest

import ddl
from tests.documents.pages import PAGES, prose

FIRST = re.compile(r"[\W_]*(What|Of|That)\b")
BANNED = re.compile(
    r"\b(lest|is told|goes on with|(?:go|going|gone) on with|lets? go of|as it comes|by itself|"
    r"foretold|not met)\b",
    re.IGNORECASE,
)
MOST_WORDS = 40


def paragraphs(text: str) -> list[str]:
    """Returns headings, items of lists, cells of tables and paragraphs."""
    return re.split(r"\n\s*\n|^#+ |^\s*(?:[-*>]|\d+\.) |\|", text, flags=re.M)


def sentences(text: str) -> list[str]:
    """Returns the sentences of a paragraph, with texts in backticks as one word."""
    plain = re.sub(
        r"`[^`]*`|\]\([^)]*\)", lambda found: "]" if found[0][0] == "]" else "`code`", text
    )
    return re.split(r"(?<=[.?!:])[)*\"]*\s+(?=[\W_]*[A-Z]|ddl\b|`)", " ".join(plain.split()))


def faults(text: str, most_words: float = MOST_WORDS) -> list[str]:
    """Returns what is wrong with the sentences of a text; a question may begin as it likes."""
    found = []
    for sentence in (one.strip() for part in paragraphs(text) for one in sentences(part)):
        if FIRST.match(sentence) and not sentence.endswith("?"):
            found.append(f"begins with What, Of or That: {sentence}")
        if BANNED.search(sentence):
            found.append(f"has a banned phrase: {sentence}")
        if len(re.findall(r"\S*\w\S*", sentence)) > most_words:
            found.append(f"has more than {most_words} words: {sentence}")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages(page):
    assert faults(prose(page)) == []


def docstrings() -> Iterator[tuple[str, str]]:
    """Yields the docstrings of public names and of their methods, without their arguments."""
    homes = ("data", "layers", "metrics", "models", "optimizers", "tasks")
    for home in (ddl, *(getattr(ddl, name) for name in homes)):
        for name in home.__all__:
            item = getattr(home, name)
            methods = vars(item) if inspect.isclass(item) else {}
            public = [one for key, one in methods.items() if not key.startswith("_")]
            for one in [item, *filter(inspect.isfunction, public)]:
                yield name, re.split(r"\n *(?:Args|Attributes):", one.__doc__ or "")[0]


def test_docstrings():
    found = [(name, faults(text, most_words=math.inf)) for name, text in docstrings()]
    assert [(name, wrong) for name, wrong in found if wrong] == []
