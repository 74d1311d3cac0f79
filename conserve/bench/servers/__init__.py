"""Servers that a benchmark starts itself: one of them computes at a time, and rows wait in a store of its own."""
