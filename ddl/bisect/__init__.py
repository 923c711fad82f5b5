"""The command `ddl bisect`: the first step at which two runs differ, and the first thing in it.

`configs` says how the runs' configs differ, and whether their steps mean the same. `search`
compares the checkpoints that both runs have, halves the steps in between by replays (`ddl.replay`)
until four are left, and records these. `first_difference` finds the first recorded value that
differs. `text` says it in words.

Two states are the same if all their variables have the same bits; figures, such as the metrics
since the last log, do not count.
"""
