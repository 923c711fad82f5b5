"""The command `python -m ddl.inspect`, which shows the data of a config."""
