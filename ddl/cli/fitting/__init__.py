"""The largest microbatch that fits into memory: `--fit_memory`.

The command tries numbers of accumulation steps, each in a process of its own (`trial.py`), which
builds the run and makes some updates: a device that ran out of memory cannot be used further. The
search (`search.py`) doubles the number until the updates fit, and bisects below. `microbatch.py`
sets the number found, unless a layer makes the result depend on it.
"""
