"""The command `python -m ddl.generate`, which continues a text with the model of a run."""
