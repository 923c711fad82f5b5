"""The command `python -m ddl.report`, which shows and compares runs on one HTML page."""
