"""The command `ddl completion`, which prints completions for a shell."""
