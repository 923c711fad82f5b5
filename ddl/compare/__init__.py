"""The command `ddl compare`: the difference of two settings over seeds, and how sure it is."""
