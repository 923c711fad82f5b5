"""The command `ddl list`, which lists what configs and flags can name."""
