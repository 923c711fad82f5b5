"""Optimizers that Keras lacks, or has in a slower form."""
