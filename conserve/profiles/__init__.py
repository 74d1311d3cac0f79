"""Latency models: batches, fits, profiles measured on an engine, and corrections learned while it runs."""
