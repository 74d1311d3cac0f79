"""Batches: files of requests become jobs, and the results of jobs become files."""
