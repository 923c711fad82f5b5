"""What a process is doing, and its stacks: for a run that is stuck, or that lost a worker."""
