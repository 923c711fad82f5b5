"""The command line: flags, argument parsing and device set-up."""
