"""One update: losses, gradients, the all-reduce, clipping, applying, averages.

In the order of an update:

    train_step         a batch and a state become the next state; begin here
    loss, metric_sums  Σ weight·loss / B of a microbatch, and its metric sums
    global_gradient    a loss's gradient over all microbatches and replicas
    replicas           `strategy.run` for each microbatch, the all-reduce, `strategy.reduce`
    engine, clipping   the plan of losses and optimizers; factor, penalties, clip, apply
    overflow           skips an update, and restores what it changed

    planning           before the first update: which losses, optimizers and variables
    update, gradients  the verbs of a task's own step, and the values that they compute with
    state              what the loop carries; `StepBatch`, by which a step names its data

    rows, sharding, remat, compiled   sparse gradients, shares of slots, recomputation, XLA
    fixed_order, effects, moving_statistics   sums in order; draws and writes of a trace; moments
"""
