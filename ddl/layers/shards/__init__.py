"""Shards of a microbatch: the parts that are computed at one shape on any number of devices.

With `batch_shards = V`, R replicas compute V/R shards each, side by side in one graph
(`lockstep.py`). Sums over the shards are one binary tree of pairwise additions (`tree.py`), whose
lower part lies within a replica and whose upper part joins the replicas. So neither a kernel's
shape nor the order of a sum depends on R. `ddl.step.shards` computes gradients with them.
"""
