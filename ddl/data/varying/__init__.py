"""Examples of varying length: packed into rows of one length, or batched by length."""

from ddl.data.varying.bucketed import BucketedSource, bucketed
from ddl.data.varying.packed import packed
from ddl.data.varying.token_lines import token_lines

__all__ = ["BucketedSource", "bucketed", "packed", "token_lines"]
