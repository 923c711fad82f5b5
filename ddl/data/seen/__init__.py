"""The inverse of the order of examples: when a run read an example.

`ddl.data.order` says which example stands at a position of an epoch. This package says at which
position an example stands: the cipher of the order is run backwards, so that the answer takes as
long for 10⁹ examples as for 10⁴.
"""

from ddl.data.seen.positions import Place, place_of, position_of

__all__ = ["Place", "place_of", "position_of"]
