"""The command `ddl train`, which is `ddl.main`."""
