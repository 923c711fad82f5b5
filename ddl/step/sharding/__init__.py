"""Sharded optimizer state: each replica keeps the slots of its share of every weight.

ZeRO stage 1 of Rajbhandari et al. 2020, "ZeRO: Memory optimizations toward training trillion
parameter models". A tensor is cut into one share for each replica, padded to one size.

    replica         gradients of its examples             whole
    cross-replica   reduce-scatter                        its share of the sum
    replica         unscale, penalties, clip, optimizer   its share of slots and weights
    cross-replica   all-gather                            whole weights

Several microbatches are added up whole, and reduced once.

An optimizer that computes entry by entry makes the same update on shares. Both exchanges together
send what an all-reduce sends. A step of one's own may compute with gradients, so those that
`update.gradients` returns are whole on all replicas, and `update.apply` takes shares of them.

Checkpoints hold whole slots (`ddl.checkpoints.contents`). Averages of the weights are whole.
"""

from ddl.step.sharding.in_shares import InShares
from ddl.step.sharding.optimizers import Sharding, sharding_of, variables_of

__all__ = ["InShares", "Sharding", "sharding_of", "variables_of"]
