"""The command `ddl show`, which shows where values come from, and how two configs differ."""
