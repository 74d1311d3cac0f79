"""Batches timed on a real engine, for the latency model."""
