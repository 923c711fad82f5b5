"""Effects of a traced loss or step besides its results: stateful operations, writes."""
