"""Names for configs, origins of values, and comparison of two configs."""
