"""Results that a trainer keeps, shows and returns: history, progress, predictions."""
