"""The methods of `update` in a task's own step, called verbs, and the gradients that they return.

A task with a method `step(update, batch)` replaces the built-in update. It is written as if one
device held the global batch: it runs in cross-replica context, and each verb divides the work among
the replicas and microbatches.
"""
