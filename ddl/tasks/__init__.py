"""Tasks: a model, its per-example loss and its metrics."""
