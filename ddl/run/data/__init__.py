"""The data of a config alone: shown, and written into records."""
