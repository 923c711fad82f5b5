"""The command line: flags, exit statuses and device set-up."""
