"""Where the time of a run goes, and what its process and its GPUs use."""
