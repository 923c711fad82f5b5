"""The command `ddl replay`: any past update of a run, computed again.

`folder` reads what a run has left, without TensorFlow. `processes` starts a process for each
replay; in it, `worker` answers commands with a `Replayer`, which rebuilds the run from its
`operative_config.gin`, restores a checkpoint and trains on as the run did. One process computes the
very updates of the run. Another one, which begins from a state that the first one saved, records
the values of an update with the recorder of `ddl.checking`: the operations that bring values out
may change how TensorFlow fuses others, and so the last bits. `ddl.bisect` uses both.

Nothing is written below the run's directory: checkpoints are linked into a temporary folder first.
"""
