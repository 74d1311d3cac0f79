"""Benchmarks: `make bench`, or `python -m tests.benchmarks NAME...`. Targets live here, never in a test."""
