"""Examples of varying length, packed into rows of one length."""

from ddl.data.varying.packed import packed
from ddl.data.varying.token_lines import token_lines

__all__ = ["packed", "token_lines"]
