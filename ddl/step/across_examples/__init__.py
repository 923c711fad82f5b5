"""Losses across examples (`ddl.gather`) where a global batch has several microbatches.

The loss of a row reads rows of other microbatches, which are computed later. Their gradients are
sums over the losses of all microbatches. Three passes over the microbatches compute both at the
memory of one (Gao et al. 2021, "Scaling deep contrastive learning batch size under memory limited
setup", arXiv:2101.06983: GradCache):

    pass 1   forward             the rows that the loss gathers, kept for all microbatches
             all-gather          once per gradient
    pass 2   loss, backward      gradients of the gathered rows; gradients of the weights through
                                 all that the loss does not gather
             reduce-scatter      once per gradient
    pass 3   forward, backward   gradients of the weights through the gathered rows

Each pass draws the same random numbers and begins with the same moving statistics, which the last
one moves. BatchNormalization computes the same moments of each microbatch three times, as their
gradients pass through them. If the loss reads the model's output only from the gathered rows, no
operation of the model is left in pass 2, as in the paper.
"""
