"""Training with `batch_shards`: the same bits on any number of devices (docs/same_bits.md).

    replica         gradients and sums of each of its shards, over the microbatches
    replica         the lower part of the tree of additions: over its shards
    cross-replica   the upper part: over the replicas of all workers

`gradient.py` computes that in the place of `ddl.step.global_gradient`, `checks.py` refuses what
would depend on the devices. `ddl.distribution.arithmetic` fixes the choice of the kernels.
"""
