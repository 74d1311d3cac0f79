"""Rendering of rows into a job's requests, in execution order."""
