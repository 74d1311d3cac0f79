"""Latency models and the profiler that measures them (to come)."""
