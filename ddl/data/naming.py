"""Names of the parts of examples that come as tuples."""

from collections.abc import Mapping
from typing import Any

from ddl.errors import DataError


def named(inputs: Any, label: Any, weight: Any = None) -> dict[str, Any]:
    """Returns a tuple as Keras takes it as features by name.

    Args:
      inputs: The feature "image", or a dict of features by name.
      label: The feature "label".
      weight: The feature "weight"; None: all examples weigh the same.

    Raises:
      DataError: If the dict has a feature of one of these names too.
    """
    features = dict(inputs) if isinstance(inputs, Mapping) else {"image": inputs}
    others = {"label": label} | ({} if weight is None else {"weight": weight})
    for name in others:
        if name in features:
            raise DataError(
                f"The features of a tuple (features, label) must not be named {name!r}, as the "
                "label and the weights are. Rename the feature, or pass one dict of all features."
            )
    return features | others
