"""Current work and stacks of a process, for a run that is stuck or has lost a worker."""
