"""Pieces of an update that XLA compiles, on each replica, with the collectives between them."""
