"""The tutorials' networks, as ddl builds them. Imports ddl at the first call."""

from typing import Any


def mlp() -> Any:
    """Builds the network of the second tutorial, for images of 28×28."""
    import ddl

    return ddl.models.mlp((28, 28, 1), 10, dropout=0.2)


def cnn(height: int = 28) -> Any:
    """Builds the network of the third tutorial, for square images of one channel."""
    import ddl

    return ddl.models.cnn((height, height, 1), 10, block_dropout=0.25, hidden_dropout=0.5)
