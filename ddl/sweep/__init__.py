"""The command `ddl sweep`: many runs over a grid, lists or random draws of bindings."""
