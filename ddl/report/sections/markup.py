"""Texts and tables as HTML."""

import html
import re
from collections.abc import Sequence

from ddl.report.charts import one_line

NONE = '<span class="absent">–</span>'
"""A cell without a value."""


def escaped(given: str) -> str:
    """Returns a text as HTML, on one line, with control characters escaped."""
    return html.escape(one_line(given))


def dotted(name: str) -> str:
    """Returns a name as HTML that a narrow table breaks at dots, slashes and underscores."""
    return re.sub(r"([._/])", r"\1<wbr>", escaped(name))


def breakable(name: str) -> str:
    """Returns the name or path of a run as HTML that breaks at its parts, not within a number."""
    return re.sub(r"([,_/])", r"\1<wbr>", escaped(name))


def table(heads: Sequence[str], rows: Sequence[str]) -> str:
    """Returns a table from the HTML of its head cells and of its rows."""
    return (
        f'<div class="scroll"><table><thead><tr>{"".join(heads)}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )
