"""What the documents name is there."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
ROOT = TESTS.parent


def test_the_tests_that_the_page_for_horovod_users_names_exist():
    page = (ROOT / "README.md").read_text().split("## From Horovod\n")[1].split("\n## ")[0]
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 20
    for call, ours, shown_by in rows:
        if ours == "–":
            assert shown_by.startswith("–"), call
        file = ""
        for named_file, test in re.findall(r"`([\w/]*\.py|)::(\w+)`", shown_by):
            file = named_file or file
            functions = {
                node.name
                for node in ast.parse((TESTS / file).read_text()).body
                if isinstance(node, ast.FunctionDef)
            }
            assert test in functions, f"{call}: {file}::{test}"
        assert file or shown_by.startswith("–"), call


def test_the_files_that_the_documents_name_exist():
    for document in ("README.md", "BUILD.md"):
        for path in re.findall(
            r"`((?:configs|tests|ddl|benchmarks)/[\w./]+\.\w+)`", (ROOT / document).read_text()
        ):
            assert (ROOT / path).exists(), f"{document} names {path}"
