"""Sections of the page of a report, and the HTML that they share."""
