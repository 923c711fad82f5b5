"""The command line: flags, argument parsing, device set-up and a quiet start-up."""
