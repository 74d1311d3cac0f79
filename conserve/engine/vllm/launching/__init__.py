"""Processes of an engine: environment, flags, number format, threads."""
