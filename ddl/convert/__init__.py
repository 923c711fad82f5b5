"""The command `python -m ddl.convert`, which writes the data of a config into records."""
