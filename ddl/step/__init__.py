"""One update: losses, gradients, the all-reduce, clipping, applying, averages."""
