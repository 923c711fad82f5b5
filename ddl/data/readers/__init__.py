"""Readers of files, and data that come with ddl."""
