"""The language of documents and docstrings: how sentences begin, banned phrases, their length."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.documents.pages import PAGES, ROOT, prose

FIRST = re.compile(r"[\W_]*(What|Of|That)\b")
BANNED = re.compile(
    r"\b(lest|is told|goes on with|(?:go|going|gone) on with|lets? go of|as it comes|by itself|"
    r"foretold|not met)\b",
    re.IGNORECASE,
)
MOST_WORDS = 40
# Headings and a line of pages that explain one thing each.
KEPT = {"What an update costs", "What a replica holds", "What remains:"}


def blocks_of(text: str) -> Iterator[tuple[str, bool]]:
    """Yields headings, items of lists, cells of tables and paragraphs, and which are paragraphs."""
    without_code = re.sub(r"^ {4}.*$", "", text, flags=re.M)
    for block in filter(None, re.split(r"\n\s*\n|^(#+ .*)$", without_code, flags=re.M)):
        if re.match(r"\s*(?:[-*|>]|#+|\d+\.) ", block):
            for item in re.split(r"^\s*(?:[-*>]|#+|\d+\.) |\|", block, flags=re.M):
                yield item, False
        else:
            yield block, True


def sentences(text: str) -> list[str]:
    """Returns the sentences of a block, with texts in backticks as one word."""
    plain = re.sub(
        r"`[^`]*`|\]\([^)]*\)", lambda found: "]" if found[0][0] == "]" else "`code`", text
    )
    found = re.split(r"(?<=[.?!])[)*\"]*\s+(?=[\W_]*[A-Z]|ddl\b|`)", " ".join(plain.split()))
    return [one.strip() for one in found if one.strip()]


def faults(text: str) -> list[str]:
    """Returns what is wrong with the sentences of a page."""
    return [
        fault
        for block, is_paragraph in blocks_of(text)
        for sentence in sentences(block)
        for fault in faults_of(sentence, MOST_WORDS if is_paragraph else None)
    ]


def faults_of(sentence: str, most_words: int | None = None) -> Iterator[str]:
    """Yields what is wrong with a sentence; a question may begin as it likes."""
    if FIRST.match(sentence) and not sentence.endswith("?") and sentence not in KEPT:
        yield f"begins with {FIRST.match(sentence)[1]}: {sentence}"
    if found := BANNED.search(sentence):
        yield f"says {found[0]!r}: {sentence}"
    words = len([word for word in sentence.split() if re.search(r"\w", word)])
    if most_words is not None and words > most_words:
        yield f"has {words} words, more than {most_words}: {sentence}"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("# What it is\n\nA page.", "begins with What"),
        ("A line. Of the others,\nnone.", "begins with Of"),
        ("- one\n- **That is** two", "begins with That"),
        ("| a | What b |", "begins with What"),
        ("It runs, lest it stops.", "says 'lest'"),
        ("a " * 41 + "end.", "has 42 words"),
    ],
)
def test_a_fault_is_found(text, fault):
    (found,) = faults(text)
    assert found.startswith(fault)


def test_what_is_no_fault():
    assert not faults("What is it? See below. ddl runs.\n\n- " + "a " * 50)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages(page):
    assert faults(prose(page)) == []


def docstrings(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            # An entry of a list of arguments begins anew.
            yield re.sub(r"^ *[*\w]+: ", r"\n\n", value.value, flags=re.M)


def test_docstrings():
    found = {
        f"{path.relative_to(ROOT)}: {fault}"
        for path in (ROOT / "ddl").rglob("*.py")
        for text in docstrings(path)
        for block in text.split("\n\n")
        for sentence in sentences(block)
        for fault in faults_of(sentence)
    }
    assert found == set()
